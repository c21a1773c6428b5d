"""The server side: find the model, train the task adapter, merge and quantize (torch, peft)."""
