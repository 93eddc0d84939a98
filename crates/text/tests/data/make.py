#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the golden data of this folder. Expected values come from other implementations: ids and splits from HF
`tokenizers` 0.23.3, prompts from Jinja2 3.1.6 set up as Hugging Face's `transformers` does.

    pip install tokenizers==0.23.3 jinja2==3.1.6
    python make.py --demo ../../../../demo/pycoder-7m-q8_0.gguf --vocab VOCAB

VOCAB is `data/vocab` of the large data set: inputs, splits and real chat templates are taken from it.
"""
import argparse, datetime, json, struct
from pathlib import Path

import jinja2, jinja2.ext, jinja2.sandbox
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

HERE = Path(__file__).parent
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


# ------------------------------------------------------------------ GGUF, keys only

def string(text):
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def compact(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def pair(key, value):
    def array(kind, items):
        return struct.pack("<IIQ", 9, kind, len(items)) + b"".join(items)
    if isinstance(value, bool):
        body = struct.pack("<I?", 7, value)
    elif isinstance(value, int):
        body = struct.pack("<II", 4, value)
    elif isinstance(value, str):
        body = struct.pack("<I", 8) + string(value)
    elif isinstance(value[0], str):
        body = array(8, [string(v) for v in value])
    elif isinstance(value[0], float):
        body = array(6, [struct.pack("<f", v) for v in value])
    else:
        body = array(5, [struct.pack("<i", v) for v in value])
    return string(key) + body


def write_gguf(name, keys):
    pairs = [pair("general.architecture", "none")] + [pair("tokenizer." + k, v) for k, v in keys.items()]
    (HERE / name).write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs))


def read_strings(path, wanted):
    """One array of strings of a GGUF file."""
    raw, at = Path(path).read_bytes(), 24
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

    def text():
        nonlocal at
        n = struct.unpack_from("<Q", raw, at)[0]
        at += 8 + n
        return raw[at - n:at].decode()
    for _ in range(struct.unpack_from("<Q", raw, 16)[0]):
        key, kind = text(), struct.unpack_from("<I", raw, at)[0]
        at += 4
        if kind == 8:
            text()
        elif kind == 9:
            kind, n = struct.unpack_from("<IQ", raw, at)
            at += 12
            values = [text() for _ in range(n)] if kind == 8 else None
            at += 0 if kind == 8 else n * sizes[kind]
            if key == wanted:
                return values
        else:
            at += sizes[kind]


# ------------------------------------------------------------------ vocabularies

QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")
CHATML = ("{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
          "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}")


def byte_level(demo):
    """The first merges of the demo model's vocabulary: a vocabulary of its own."""
    merges = [tuple(m.split(" ")) for m in read_strings(demo, "tokenizer.ggml.merges")][:1500]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "</s>"]
    user = ["<think>", "<thin", "  <tool>"]
    tokens = special[:3] + letters + [a + b for a, b in merges] + special[3:] + user
    vocab = {t: i for i, t in enumerate(tokens)}
    plain = {t: i for t, i in vocab.items() if t not in special and t not in user}
    hf = Tokenizer(models.BPE(vocab={**plain, **vocab}, merges=merges))
    hf.normalizer = normalizers.NFC()
    hf.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN2), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    hf.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    hf.add_tokens([AddedToken(t, normalized=False) for t in user])
    types = [CONTROL if t in special else USER_DEFINED if t in user else NORMAL for t in tokens]
    write_gguf("byte-level.gguf", {
        "ggml.model": "gpt2", "ggml.pre": "qwen2", "ggml.tokens": tokens, "ggml.token_type": types,
        "ggml.merges": [" ".join(m) for m in merges], "ggml.bos_token_id": 0, "ggml.eos_token_id": 2,
        "ggml.add_bos_token": True, "ggml.add_eos_token": True, "chat_template": CHATML})
    return hf, special + user, (0, 2)


def sentencepiece(texts):
    """A vocabulary trained on the test texts, with byte tokens and scores as SentencePiece writes them."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("\u2581+[^\u2581]*"), "isolated")
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1400, limit_alphabet=300, show_progress=False))
    learnt = json.loads(trained.to_str())["model"]
    control, user = ["<unk>", "<s>", "</s>"], ["<extra>"]
    pieces = ["".join(m) for m in learnt["merges"]]
    pieces = dict.fromkeys(pieces + ["\u2581", *sorted(t for t in learnt["vocab"] if len(t) == 1)])
    pieces = [p for p in pieces if p not in control + user]
    tokens = control + [f"<0x{b:02X}>" for b in range(256)] + pieces + user
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces) + [USER_DEFINED]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [0.0]
    index = {t: i for i, t in enumerate(tokens)}
    merges = []
    for token in pieces:
        cuts = [(token[:j], token[j:]) for j in range(1, len(token)) if token[:j] in index and token[j:] in index]
        merges += [(-scores[index[token]], index[a], index[b], a, b) for a, b in cuts]
    hf = Tokenizer(models.BPE(vocab=index, merges=[m[3:] for m in sorted(merges)], unk_token="<unk>", fuse_unk=True,
                              byte_fallback=True))
    hf.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    hf.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    hf.add_tokens([AddedToken(t, normalized=False) for t in user])
    write_gguf("sentencepiece.gguf", {
        "ggml.model": "llama", "ggml.pre": "default", "ggml.tokens": tokens, "ggml.token_type": types,
        "ggml.scores": scores, "ggml.bos_token_id": 1, "ggml.eos_token_id": 2, "ggml.unknown_token_id": 0,
        "ggml.add_bos_token": True, "ggml.add_eos_token": False, "ggml.add_space_prefix": True})
    return hf, control + user, (1, None)


def write_vectors(name, made, texts):
    hf, special, (bos, eos) = made
    inputs = [(text, False, False) for text in texts]
    for token in special:
        for text in (token, f"a {token} b", token + token[:-1], f"\n{token}{special[0]}x", token[:3]):
            inputs += [(text, False, False), (text, True, False)]
    inputs += [("", True, True), ("Hello world", True, True), (special[1] + "x", False, True)]
    with open(HERE / name, "w", encoding="utf-8") as out:
        for text, parse_special, add_special in inputs:
            hf.encode_special_tokens = not parse_special
            ids = hf.encode(text, add_special_tokens=False).ids
            if add_special:
                ids = [bos] + ids + ([] if eos is None else [eos])
            line = {"text": text, "parse_special": parse_special, "add_special": add_special, "ids": ids}
            out.write(compact(line) + "\n")


# ------------------------------------------------------------------ chat templates

NOW = datetime.datetime(2024, 7, 3, 4, 5, 9)


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.If(jinja2.nodes.Const(True), body, [], []).set_lineno(line)


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = NOW.strftime
    return env


def conversations():
    def user(text):
        return {"role": "user", "content": text}

    def assistant(text, **more):
        return {"role": "assistant", "content": text, **more}
    system = {"role": "system", "content": " Be <brief> & \u201ckind\u201d. "}
    weather = {"type": "function", "function": {
        "name": "weather", "description": "Weather at a place, <now> & later; \u00e9\u00e8",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer", "default": 1}},
                       "required": ["place"], "additionalProperties": False}}}
    arguments = {"place": "Z\u00fcrich 'old' \"town\"", "days": 2, "units": ["C", None, True, 1.5], "deep": {"b": {}, "a": []}}
    call = assistant("", tool_calls=[{"type": "function", "id": "1", "function": {"name": "weather", "arguments": arguments}}])
    answer = {"role": "tool", "content": "{\"sky\": \"clear\"}", "tool_call_id": "1"}
    thought = assistant("<think>\nhm, \u00fc\n</think>\n\nHi!\n")
    yield dict(messages=[user("Hello")], add_generation_prompt=True)
    yield dict(messages=[system, user("  Hello\r\nthere  ")], add_generation_prompt=True)
    yield dict(messages=[user("Hi"), assistant("Hello!"), user("And?")], add_generation_prompt=False)
    yield dict(messages=[user("Hi"), thought, user("More")], add_generation_prompt=True, enable_thinking=False)
    yield dict(messages=[system, user("Hi"), thought], add_generation_prompt=False, enable_thinking=True)
    yield dict(messages=[user("Weather?"), call, answer, answer], tools=[weather], add_generation_prompt=True)
    yield dict(messages=[system, user("Weather?"), call], tools=[weather, weather], add_generation_prompt=True)
    yield dict(messages=[user("a"), user("b")], add_generation_prompt=True)
    yield dict(messages=[user(str(i)) if i % 2 == 0 else assistant(str(i)) for i in range(9)], add_generation_prompt=True)


def write_prompts(templates):
    env = environment()
    with open(HERE / "prompts.jsonl", "w", encoding="utf-8") as out:
        for name, source in templates.items():
            template = env.from_string(source)
            for input in conversations():
                line = {"template": name, "input": input}
                try:
                    line["prompt"] = template.render(
                        **{"tools": None, "documents": None, "bos_token": "<bos>", "eos_token": "<eos>", **input})
                except jinja2.exceptions.TemplateError as refused:
                    line["refused"] = str(refused)
                out.write(compact(line) + "\n")


def template_of(vocab, name):
    raw = (vocab / f"{name}.gguf").read_bytes()
    at = raw.index(b"tokenizer.chat_template") + len("tokenizer.chat_template") + 4
    n = struct.unpack_from("<Q", raw, at)[0]
    return raw[at + 8:at + 8 + n].decode()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", required=True, help="demo model, whose vocabulary is cut")
    parser.add_argument("--vocab", required=True, type=Path, help="data/vocab of the large data set")
    args = parser.parse_args()

    texts = list(dict.fromkeys(json.loads(line)["text"] for line in open(args.vocab / "qwen3.jsonl")))
    texts = [t for t in texts if len(t) <= 200]
    write_vectors("byte-level.jsonl", byte_level(args.demo), texts)
    write_vectors("sentencepiece.jsonl", sentencepiece(texts), texts)

    with open(HERE / "splits.jsonl", "w", encoding="utf-8") as out:
        for line in open(args.vocab / "pretok.jsonl"):
            record = json.loads(line)
            if "regex" in record:
                out.write(compact(record) + "\n")
            elif len(record["text"]) <= 24:
                # The pieces of a text are all of it.
                out.write(compact({"pieces": record["pieces"]}) + "\n")

    (HERE / "qwen3.jinja").write_text(template_of(args.vocab, "qwen3"))
    names = {"qwen3": template_of(args.vocab, "qwen3"), "features": (HERE / "features.jinja").read_text(),
             "llama3": template_of(args.vocab, "llama3"), "gemma": template_of(args.vocab, "gemma")}
    write_prompts(names)


if __name__ == "__main__":
    main()
