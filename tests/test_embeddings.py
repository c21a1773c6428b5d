"""Vectors for dense retrieval: against a plain reference, kept in the store, used by prompts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_prompts import make_tokenizer, movie_fan  # noqa: F401  # a fixture
from transformers import BertConfig, BertModel

from lamp_eval.child import Child
from lamp_eval.config import ProtocolConfig
from lamp_eval.embeddings import Embedder
from lamp_eval.errors import UserError
from lamp_eval.prompts import make_encoder
from lamp_eval.store import Store
from lamp_eval.tasks import TASKS
from recipes.embeddings import embed_texts

TEXTS = ["a film of robots", "", "robots", "castle " * 200, "two strangers kiss at midnight"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """A random BERT with a tokenizer."""
    folder = tmp_path_factory.mktemp("embedding_model")
    tokenizer = make_tokenizer(template="<bos> $A <eos>")
    tokenizer.pad_token = "<eos>"
    tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(config).save_pretrained(folder)
    return folder


def reference(model_dir: Path, text: str, *, first_token: bool = False) -> np.ndarray:
    """One text at a time, without padding."""
    model = BertModel.from_pretrained(model_dir).eval()
    tokenizer = make_tokenizer(template="<bos> $A <eos>")
    ids = tokenizer.encode(text)
    if len(ids) > 64:
        ids = [*ids[:63], tokenizer.eos_token_id]
    with torch.inference_mode():
        states = model(torch.tensor([ids])).last_hidden_state[0]
    pooled = states[0] if first_token else states.mean(0)
    return (pooled / pooled.norm()).numpy()


def test_tokens_are_averaged_and_padding_changes_nothing(model_dir):
    vectors = embed_texts(model_dir, TEXTS, device="cpu")
    assert (vectors.shape, vectors.dtype) == ((5, 16), np.float32)
    for vector, text in zip(vectors, TEXTS, strict=True):
        np.testing.assert_allclose(vector, reference(model_dir, text), atol=1e-5)
    assert np.abs(vectors[0] - vectors[4]).max() > 0.01  # the premise: they differ


def pooling(model_dir: Path, tmp_path: Path, **modes: bool) -> Path:
    folder = tmp_path / "pooled"
    folder.mkdir()
    for path in model_dir.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "1_Pooling").mkdir()
    settings = {f"pooling_mode_{name}": on for name, on in modes.items()}
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 16, **settings})
    )
    return folder


def test_the_models_own_pooling_counts(model_dir, tmp_path):
    folder = pooling(model_dir, tmp_path, cls_token=True, mean_tokens=False)
    (vector,) = embed_texts(folder, TEXTS[:1], device="cpu")
    np.testing.assert_allclose(vector, reference(model_dir, TEXTS[0], first_token=True), atol=1e-5)


def test_another_pooling_is_refused(model_dir, tmp_path):
    folder = pooling(model_dir, tmp_path, max_tokens=True, mean_tokens=False)
    with pytest.raises(UserError, match="pooling_mode_max_tokens"):
        embed_texts(folder, TEXTS, device="cpu")


def test_a_folder_without_a_model_is_refused(tmp_path):
    with Child() as child, pytest.raises(UserError, match="embedding_model"):
        Embedder(tmp_path / "nothing", Store(tmp_path), "cpu", child)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="embedding_model"):
        embed_texts(tmp_path, TEXTS, device="cpu")


class CountingChild:
    """Computes here and now, and counts."""

    def __init__(self) -> None:
        self.texts: list[list[str]] = []

    def run(self, function, model_dir, texts, *, device, report):
        assert function == "recipes.embeddings:embed_texts"
        self.texts.append(list(texts))
        return embed_texts(model_dir, texts, device=device, report=report)


def test_vectors_are_computed_once_and_kept(model_dir, tmp_path):
    child, store = CountingChild(), Store(tmp_path / "stages")
    embed = Embedder(model_dir, store, "cpu", child)
    first = embed([*TEXTS, TEXTS[0]])
    np.testing.assert_array_equal(first[0], first[5])
    assert child.texts == [sorted(TEXTS)]
    np.testing.assert_array_equal(embed(TEXTS), first[:5])
    np.testing.assert_array_equal(Embedder(model_dir, store, "cpu", child)(TEXTS), first[:5])
    assert len(child.texts) == 1
    embed(["new", TEXTS[0]])
    assert child.texts[1:] == [["new"]]


@pytest.mark.parametrize("protocol", ["oppu", "lamp_chat"])
def test_prompts_show_the_record_of_the_nearest_vector(model_dir, tmp_path, movie_fan, protocol):  # noqa: F811
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    task = TASKS["movie_tagging"]
    embed = Embedder(model_dir, Store(tmp_path / "stages"), "cpu", CountingChild())
    config = ProtocolConfig(name=protocol, retrieval="dense", embedding_model=str(model_dir))
    encode = make_encoder(tokenizer, task, config, embed=embed)
    (request,) = encode.requests(movie_fan, 1)
    if protocol == "oppu":
        documents = [task.oppu.retrieval_history.format(**r.fields) for r in movie_fan.history]
        (text,) = task.oppu.texts(movie_fan.queries[0].input)
        search = task.oppu.retrieval_query_test.format(text)
    else:
        documents = [record.fields["description"] for record in movie_fan.history]
        search = movie_fan.queries[0].input
    vectors = np.stack([reference(model_dir, text) for text in (*documents, search)])
    nearest = int(np.argmax(vectors[:-1] @ vectors[-1]))
    shown = movie_fan.history[nearest].fields["description"]
    text = tokenizer.decode(request.prompt)
    assert [r.fields["description"] in text for r in movie_fan.history].count(True) == 1
    assert shown in text
    examples = encode.user_examples(movie_fan, 1)
    assert len(examples) == 4
    assert movie_fan.history[0].fields["description"] in tokenizer.decode(examples[1].tokens)
