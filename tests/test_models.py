"""The story generator, the held-out stories, the evaluation, and the files of the two tiny models."""

import hashlib
import io
import json
import os
import re
import subprocess
import sys
from itertools import islice, pairwise
from pathlib import Path

import jinja2
import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer, pre_tokenizers

from models import agreement, chat_quality, evaluate, smollm2, stories

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "models"
NAMES = ["tiny-llama", "tiny-qwen3"]


def told(seed: int, n: int) -> list[stories.Story]:
    return list(islice(stories.stories(seed), n))


# ----------------------------------------------------------------------------
# Stories


def test_the_same_seed_gives_the_same_text_whatever_the_hash_seed():
    command = [sys.executable, "-m", "models.stories", "--seed", "7", "-n", "40"]
    outputs = {
        subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": h}, capture_output=True, check=True
        ).stdout
        for h in ("0", "1", "2")
    }
    assert len(outputs) == 1
    assert told(7, 40) == told(7, 40)
    assert told(7, 40) != told(8, 40)
    assert list(stories.documents(3, 30)) == list(stories.documents(3, 30))


def test_held_out_files_come_from_the_generator():
    text, marks = stories.held_out()
    assert (MODELS / "held_out.txt").read_bytes() == text.encode()
    assert evaluate.read_marks() == marks
    assert 60_000 <= len(text) < 61_500


def test_held_out_stories_are_not_trained_on():
    held_out = stories.held_out()[0].strip().split("\n\n")
    assert len(set(held_out)) == len(held_out)
    seen = "\n\n".join(
        d.text or "\n\n".join(m.content for m in d.messages) for d in stories.training_documents(2, 3000)
    )
    assert not any(story in seen for story in held_out)


def test_training_documents_leave_out_the_held_out_seed():
    """With the very seed of the held-out stories as bait, they still do not come through."""
    bait = {s.text for s in told(stories.HELD_OUT_SEED, 300)}
    excluded = set(stories.held_out()[0].strip().split("\n\n"))
    assert excluded <= bait
    for document in stories.training_documents(stories.HELD_OUT_SEED, 300):
        assert excluded.isdisjoint(document.text.split("\n\n"))


def test_references_name_something_that_came_before():
    for story in told(11, 500):
        assert story.marks.references
        assert list(story.marks.references) == sorted(story.marks.references)
        for start, end in story.marks.references:
            word = story.text[start:end]
            assert re.search(rf"\b{re.escape(word)}\b", story.text[:start]), (word, story.text)
            assert not story.text[start - 1].isalnum() and not story.text[end].isalnum()


def test_pronouns_are_about_somebody_named_before():
    for story in told(15, 500):
        text, marks = story.text, story.marks
        named = {m[0] for m in re.finditer(r"\w+", text)} & {*stories.GIRLS, *stories.BOYS}
        for start, end, name in marks.pronouns:
            female = text[start:end].lower() in ("she", "her", "girl")
            assert female or text[start:end].lower() in ("he", "his", "him", "boy"), text[start:end]
            assert name in (stories.GIRLS if female else stories.BOYS)
            assert re.search(rf"\b{name}\b", text[:start]), (name, text)
        for start, end in marks.introductions:
            assert text[start:end] in named and not re.search(rf"\b{text[start:end]}\b", text[:start])
        # No gendered word is left out, but those that announce a name, and those of the elders in no story.
        gendered = {m.span() for m in re.finditer(r"\b([Ss]he|[Hh]e|[Hh]is|[Hh]er|him)\b", text)}
        assert gendered <= {p[:2] for p in marks.pronouns}, text


def test_marks_move_with_their_text():
    told_here = told(16, 3)
    text, marks = stories.collection(told_here)
    assert len(marks.pronouns) == sum(len(s.marks.pronouns) for s in told_here)
    for kind in ("references", "pronouns", "introductions"):
        moved = [text[m[0] : m[1]] for m in getattr(marks, kind)]
        assert moved == [s.text[m[0] : m[1]] for s in told_here for m in getattr(s.marks, kind)]


def test_grammar():
    for story in told(12, 500):
        text = story.text
        assert not re.search(r"\b[Aa] [aeiouAEIOU]", text), text
        assert not re.search(r"\b[Aa]n (?!honest)[^aeiouAEIOUh]", text), text
        assert not re.search(r"\s\s|\s[.,!?;]|[{}\[\]|]|[.,!?]{2}", text), text
        assert text[0].isupper() and text == text.strip()
        assert text[-1] in '.!"', text
        # Quotations: every second mark opens one, after a space (or at the start) and before a letter.
        marks = [m.start() for m in re.finditer('"', text)]
        assert len(marks) % 2 == 0, text
        for opening, closing in zip(marks[::2], marks[1::2], strict=True):
            assert opening == 0 or text[opening - 1] == " "
            assert text[opening + 1].isupper() or text[opening - 2] not in ".!?", text
            assert text[closing - 1] in ".,!?", text
        # Sentences start with a capital.
        for m in re.finditer(
            r'[.!?] "?(\w)', re.sub(r'[.!?]" (asked|said|cried|called|shouted|\w+ asked|\w+ told)', "", text)
        ):
            assert m[1].isupper() or m[1].isdigit(), text


def test_pronouns_agree():
    """A story whose people are all girls has no "he" in it, and the other way round."""
    girls, boys = set(stories.GIRLS), set(stories.BOYS)
    assert not girls & boys
    for story in told(13, 500):
        words = set(re.findall(r"\w+", story.text))
        if not words & boys:
            assert not words & {"he", "his", "him", "boy", "He", "His"}, story.text
        if not words & girls:
            assert not words & {"she", "her", "girl", "She", "Her"}, story.text


def test_stories_differ_and_use_every_plot_and_name():
    texts = [s.text for s in told(14, 4000)]
    assert len(set(texts)) == len(texts)
    words = set(re.findall(r"\w+", " ".join(texts)))
    for listed in (stories.GIRLS, stories.BOYS, stories.THINGS, stories.FOODS, stories.JOBS, stories.ANIMALS):
        assert set(listed) <= words
    assert len(stories.PLOTS) >= 8
    assert len(words) > 1000


def test_conversations():
    chats = [d.messages for d in stories.documents(5, 2000) if d.messages]
    assert 0.15 < len(chats) / 2000 < 0.21
    assert any(m[0].role == "system" for m in chats)
    for messages in chats:
        roles = [m.role for m in messages]
        rest = roles[1:] if roles[0] == "system" else roles
        assert rest == ["user", "assistant"] * (len(rest) // 2)
        assert all(m.thought for m in messages if m.role == "assistant")
        for request, answer in pairwise(messages):
            if "story about" in request.content:
                names = set(re.findall(r"\b[A-Z]\w+", request.content)) & {*stories.GIRLS, *stories.BOYS}
                assert names and all(name in answer.content for name in names)


# ----------------------------------------------------------------------------
# Agreement of what a model has written

OTHER = {"he": "she", "she": "he", "his": "her", "him": "her", "her": "his", "girl": "boy", "boy": "girl"}


def test_stories_of_the_generator_agree():
    for story in told(17, 100):
        assert agreement.disagreements(story.text) == []


def test_every_pronoun_of_the_wrong_gender_is_found():
    for story in told(18, 20):
        for start, end, _ in story.marks.pronouns:
            right = story.text[start:end]
            wrong = OTHER[right.lower()]
            wrong = wrong.capitalize() if right[0].isupper() else wrong
            assert agreement.disagreements(story.text[:start] + wrong + story.text[end:]), story.text[:end]


def test_a_name_of_the_wrong_gender_is_found():
    for story in told(19, 40):
        for start, end in story.marks.introductions:
            wrong = next(n for n in (stories.BOYS if story.text[start:end] in stories.GIRLS else stories.GIRLS))
            changed = re.sub(rf"\b{story.text[start:end]}\b", wrong, story.text)
            assert agreement.disagreements(changed), changed


@pytest.mark.parametrize(
    ("story", "found"),
    [
        ("Once there was a girl named Mia. She had a red kite.", []),
        ("Once there was a girl named Zack.", ["Once there was a girl named Zack."]),
        ("Once there was a girl named Mia. He laughed.", ["He laughed."]),
        ("Once there were two friends, Mia and Tom. He laughed.", []),  # made up: nobody knows who
        ("Mia and Tom saw a boy named Eva.", ["Mia and Tom saw a boy named Eva."]),
        ("Mia told Tom a story. Mia told his aunt everything.", ["Mia told his aunt everything."]),
        ("The sun was shining.", []),
    ],
)
def test_disagreements(story: str, found: list[str]):
    assert agreement.disagreements(story) == found


def test_agreement_reads_standard_input():
    command = [sys.executable, "-m", "models.agreement"]
    text = "Once there was a girl named Zack.\n\nOnce there was a girl named Mia.\n"
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == "Once there was a girl named Zack.\n1 of 2 stories disagree\n"
    done = subprocess.run(command, cwd=ROOT, input=text.split("\n\n")[1], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0 of 1 stories disagree\n")


# ----------------------------------------------------------------------------
# Evaluation


def test_windows():
    assert list(evaluate.windows(10, 4, None)) == [(0, 4), (4, 8), (8, 10)]
    assert list(evaluate.windows(10, 4, 7)) == [(0, 3), (3, 6), (6, 9), (9, 10)]


@pytest.mark.parametrize(("bos", "scored"), [(None, [False, True, True] * 3 + [False]), (9, [True] * 10)])
def test_score_of_a_model_that_guesses(bos: int | None, scored: list[bool]):
    """Uniform logits: every scored token costs log(vocabulary); a token with no predecessor is not scored."""
    fed = []

    def uniform(ids: np.ndarray) -> np.ndarray:
        fed.append(list(ids))
        return np.zeros((len(ids), 16))

    nll, top, kept = evaluate.score(uniform, np.arange(10) % 5, context=3, bos=bos, keep=[0, 1, 9])
    assert np.array_equal(~np.isnan(nll), scored)
    assert np.allclose(nll[scored], np.log(16))
    assert np.array_equal(top >= 0, scored)
    assert sorted(kept) == [i for i in (0, 1, 9) if scored[i]]
    assert all(np.allclose(row, -np.log(16)) and row.shape == (16,) for row in kept.values())
    assert all(len(ids) <= 3 and (bos is None or ids[0] == bos) for ids in fed)


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_of_an_oracle(name: str):
    """A forward pass that knows the next token has perplexity 1 and recalls everything."""

    def oracle(ids: np.ndarray) -> np.ndarray:
        logits = np.zeros((len(ids), 2048), dtype=np.float32)
        logits[np.arange(len(ids) - 1), ids[1:]] = 100.0
        return logits

    figures = evaluate.evaluate_directory(MODELS / name, oracle)
    assert figures["perplexity"] == pytest.approx(1.0)
    assert figures["references"] == len(evaluate.read_marks().references)
    assert figures["recall_first_token"] > 0.995  # without BOS, the first token of a window is not predicted
    assert figures["recall_all_tokens"] > 0.995
    assert 0.9 < figures["reachable"] <= 1
    assert figures["agreement"] == 1
    assert figures["names_agree"] > 0.999
    assert 0.9 * len(evaluate.read_marks().pronouns) < figures["pronouns"]


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_of_a_model_without_genders(name: str):
    """A forward pass that always prefers "she", "her" and "girl", and all names alike."""
    tokenizer = Tokenizer.from_file(str(MODELS / name / "tokenizer.json"))
    female = [f"{space}{w}" for w in ("she", "her", "girl", "She", "Her") for space in ("", " ")]
    logits = np.zeros(2048)
    logits[[tokenizer.encode(w, add_special_tokens=False).ids[0] for w in female]] = 1.0
    figures = evaluate.evaluate_directory(MODELS / name, lambda ids: np.tile(logits, (len(ids), 1)))
    text, marks = (MODELS / "held_out.txt").read_text(), evaluate.read_marks()
    share = np.mean([text[s:e].lower() in ("she", "her", "girl") for s, e, _ in marks.pronouns])
    assert figures["agreement"] == pytest.approx(share, abs=0.02)
    assert figures["names_agree"] == pytest.approx(0.5, abs=0.05)


# ----------------------------------------------------------------------------
# The models' files


def load(name: str, file: str) -> dict:
    return json.loads((MODELS / name / file).read_text())


@pytest.mark.parametrize("name", NAMES)
def test_config(name: str):
    config = load(name, "config.json")
    llama = name == "tiny-llama"
    expected = {
        "model_type": "llama" if llama else "qwen3",
        "architectures": ["LlamaForCausalLM" if llama else "Qwen3ForCausalLM"],
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32 if llama else 64,
        "vocab_size": 2048,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5 if llama else 1e-6,
        "rope_theta": 500000.0 if llama else 1000000.0,
        "tie_word_embeddings": llama,
        "attention_bias": False,
        "hidden_act": "silu",
    }
    assert {key: config[key] for key in expected} == expected
    if llama:
        assert config["rope_scaling"] == {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
            "rope_type": "llama3",
        }
    else:
        assert config["rope_scaling"] is None


@pytest.mark.parametrize("name", NAMES)
def test_generation_config(name: str):
    generation, tokenizer = (
        load(name, "generation_config.json"),
        Tokenizer.from_file(str(MODELS / name / "tokenizer.json")),
    )
    assert generation["do_sample"] is True
    assert 0 < generation["temperature"] < 1 and 0 < generation["top_p"] < 1 and generation["top_k"] > 0
    eos = [tokenizer.id_to_token(i) for i in generation["eos_token_id"]]
    if name == "tiny-llama":
        assert sorted(eos) == ["<|end_of_text|>", "<|eot_id|>"]
        assert tokenizer.id_to_token(generation["bos_token_id"]) == "<|begin_of_text|>"
    else:
        assert sorted(eos) == ["<|endoftext|>", "<|im_end|>"]


@pytest.mark.parametrize("name", NAMES)
def test_weights(name: str):
    path = MODELS / name / "model.safetensors"
    assert path.stat().st_size <= 4_000_000
    config = load(name, "config.json")
    dim, hidden, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_dim, kv_dim = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer = {
        "input_layernorm": [dim],
        "post_attention_layernorm": [dim],
        "self_attn.q_proj": [q_dim, dim],
        "self_attn.k_proj": [kv_dim, dim],
        "self_attn.v_proj": [kv_dim, dim],
        "self_attn.o_proj": [dim, q_dim],
        "mlp.gate_proj": [hidden, dim],
        "mlp.up_proj": [hidden, dim],
        "mlp.down_proj": [dim, hidden],
    }
    expected = {"model.embed_tokens.weight": [2048, dim], "model.norm.weight": [dim]}
    if name == "tiny-qwen3":
        layer |= {"self_attn.q_norm": [head_dim], "self_attn.k_norm": [head_dim]}
        expected["lm_head.weight"] = [2048, dim]
    for i in range(config["num_hidden_layers"]):
        expected |= {f"model.layers.{i}.{key}.weight": shape for key, shape in layer.items()}
    with safe_open(path, framework="np") as f:
        assert {key: f.get_slice(key).get_shape() for key in f.keys()} == expected  # noqa: SIM118
        assert {f.get_slice(key).get_dtype() for key in f.keys()} <= {"F16", "BF16"}  # noqa: SIM118


@pytest.mark.parametrize("name", NAMES)
def test_tokenizer(name: str):
    tokenizer = Tokenizer.from_file(str(MODELS / name / "tokenizer.json"))
    vocab = tokenizer.get_vocab()
    assert sorted(vocab.values()) == list(range(2048))
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(vocab)
    file = load(name, "tokenizer.json")
    added = {t["content"]: t for t in file["added_tokens"]}
    assert sorted(t["id"] for t in added.values()) == list(range(2048 - len(added), 2048))
    assert file["model"]["ignore_merges"] is (name == "tiny-llama")
    if name == "tiny-llama":
        assert file["normalizer"] is None
        assert {t["special"] for t in added.values()} == {True}
        assert tokenizer.encode("Once").ids[0] == vocab["<|begin_of_text|>"]
        assert len(tokenizer.encode("Once").ids) == 2
    else:
        assert file["normalizer"] == {"type": "NFC"}
        assert [added[t]["special"] for t in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")] == [True] * 3
        assert [added[t]["special"] for t in ("<think>", "</think>")] == [False] * 2
        assert len(tokenizer.encode("Once").ids) == 1
    for text in [
        '"Where is my red kite?" asked Mia.\n\n',
        "naïve café 12345 — 日本語 🙂",
        "\t \r\n  x",
        (MODELS / "held_out.txt").read_text(),
    ]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


@pytest.mark.parametrize("name", NAMES)
def test_names_are_single_tokens(name: str):
    """Otherwise recall would measure spelling."""
    tokenizer = Tokenizer.from_file(str(MODELS / name / "tokenizer.json"))
    names = stories.GIRLS + stories.BOYS
    whole = sum(len(tokenizer.encode(f" {n}", add_special_tokens=False).ids) == 1 for n in names)
    assert whole / len(names) > 0.95


def render(name: str, messages: list[dict[str, str]], **options: bool) -> str:
    config = load(name, "tokenizer_config.json")
    template = jinja2.Environment().from_string(config["chat_template"])
    return template.render(messages=messages, bos_token=config["bos_token"], **options)


def test_llama_chat_template():
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": " U\n"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "V"},
    ]
    assert render("tiny-llama", messages, add_generation_prompt=True) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nV<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_qwen_chat_template():
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "<think>\nT\n</think>\n\nA"},
        {"role": "user", "content": "V"},
    ]
    shown = (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
        "<|im_start|>assistant\nA<|im_end|>\n<|im_start|>user\nV<|im_end|>\n"
    )
    assert render("tiny-qwen3", messages) == shown
    opened = shown + "<|im_start|>assistant\n"
    assert render("tiny-qwen3", messages, add_generation_prompt=True) == opened
    assert render("tiny-qwen3", messages, add_generation_prompt=True, enable_thinking=True) == opened
    empty = opened + "<think>\n\n</think>\n\n"
    assert render("tiny-qwen3", messages, add_generation_prompt=True, enable_thinking=False) == empty
    # The thought of the last answer stays.
    assert render("tiny-qwen3", messages[:3]).endswith("<|im_start|>assistant\n<think>\nT\n</think>\n\nA<|im_end|>\n")


@pytest.mark.parametrize("name", NAMES)
def test_figures(name: str):
    figures = load(name, "figures.json")
    assert figures["recall_first_token"] > 0.9
    assert figures["recall_reachable"] > 0.97
    assert figures["perplexity"] < 5


# ----------------------------------------------------------------------------
# Chats that do not end


def test_a_loop_is_noticed_when_it_closes():
    line = list(range(10))
    ids = [50, *line * 9]
    seen, loops = chat_quality.until_loop(ids)
    assert loops
    assert seen == ids[: 1 + 7 * 10 + 8]  # the first eight tokens for the eighth time
    assert chat_quality.until_loop(ids[: len(seen) - 1]) == (ids[: len(seen) - 1], False)
    assert chat_quality.until_loop([7] * 14) == ([7] * 14, False)
    assert chat_quality.until_loop([7] * 99) == ([7] * 15, True)


def test_ids_are_read_as_they_are_printed():
    assert list(chat_quality.printed_ids(io.StringIO("1,23,456\n"))) == [1, 23, 456]
    assert list(chat_quality.printed_ids(io.StringIO("\n"))) == []


def test_a_model_that_was_fetched_and_has_changed_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "smollm2.gguf"
    file.write_bytes(b"GGUF" + bytes(1000))
    with pytest.raises(smollm2.FetchError, match=r"smollm2\.gguf: its SHA-256 is [0-9a-f]{64}, not .*; type: rm "):
        smollm2.check(file)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    smollm2.check(file)
    rules = subprocess.run(
        ["make", "-n", "-B", "build/models/smollm2.q8.bin"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert rules.stdout.index("models.smollm2 check") < rules.stdout.index("-m export q8")
