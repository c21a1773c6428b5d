"""A tiny random model with a tokenizer: an ordinary transformers checkpoint, made in a second."""

import os
from pathlib import Path

# OpenMP's threads spin while they wait, which on a busy machine makes small products 20 times
# slower; the variable is read when the library is loaded.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import on_device  # isort: skip  # noqa: F401  # loads the BLAS, before MLX
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lamp_eval.data.phrases import MOVIES
from lamp_eval.tasks import TASKS

VOCABULARY = 400
N_BLOCKS = 4
ROPE_THETA = 100_000.0  # neither mlx-lm's default nor transformers'
EOS, PAD = "<|end|>", "<|pad|>"


def make_tiny_model(
    directory: Path, *, hidden: int = 64, n_blocks: int = N_BLOCKS, seed: int = 0
) -> Path:
    """Writes a Llama with random weights and a byte-level BPE tokenizer; equal seeds, equal bytes.

    The weights are wide enough that attention, and so rope_theta, decides the logits.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    task = TASKS["movie_tagging"]
    sentences = [*task.labels, *(cue for cues in MOVIES.cues.values() for cue in cues)]
    sentences += [task.oppu.query_prompt] * 20  # most of every prompt: few tokens, fast tests
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)
    fast.save_pretrained(directory)

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=n_blocks,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(directory)
    return directory
