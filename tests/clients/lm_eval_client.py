# SPDX-License-Identifier: Apache-2.0
"""lm-eval's local-completions: log likelihoods and a perplexity, compared with `ballast eval` and with plain HTTP."""
import json
import math
import os
import pathlib
import subprocess
import urllib.request

from common import read_fleet

fleet = read_fleet()
# lm-eval reads the key for completions from here.
os.environ["OPENAI_API_KEY"] = fleet.key
os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

# Python, as the demo model knows it; and what is no text of one byte for a character.
TEXT = '''import os


def read_lines(path):
    """Reads the lines of a file: \u00e4, \u4e2d, \U0001f600."""
    with open(path) as file:
        return [line.strip() for line in file]


class Counter:
    def __init__(self, start=0):
        self.count = start

    def add(self, number):
        self.count += number
        return self.count
'''
PAIRS = [("def add(a, b):\n    return a", " + b"), ("def add(a, b):\n    return a", " % 7"),
         ("for index in range(", "10):\n    print(index)"), ("import", " os")]


def ask(route, fields=None):
    body = fields and json.dumps({"model": fleet.model, **fields}).encode()
    headers = {"content-type": "application/json", "x-api-key": fleet.key}
    with urllib.request.urlopen(urllib.request.Request(f"{fleet.url}{route}", body, headers)) as reply:
        return json.load(reply)


def tokenize(text):
    return ask("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]


def evaluate_with_ballast(text):
    """The sum of the log probabilities of the text's tokens, by the executable."""
    file = pathlib.Path("text.txt")
    file.write_text(text)
    command = [fleet.executable, "eval", fleet.model_file, "--text", file, "--json", "--device", "host"]
    done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return -done["tokens"] * math.log(done["perplexity"])


def score_over_http(context, continuation):
    """What OpenAI's API says of the tokens of `continuation`, and whether they are the most probable ones."""
    tokens = tokenize(context + continuation)
    begin = len(tokenize(context))
    fields = {"prompt": tokens, "echo": True, "logprobs": 1, "max_tokens": 0}
    logprobs = ask("/v1/completions", fields)["choices"][0]["logprobs"]
    own, top = logprobs["token_logprobs"][begin:], logprobs["top_logprobs"][begin:]
    return sum(own), all(max(entry.values()) == logprob for entry, logprob in zip(top, own))


def requests(kind, arguments):
    return [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]


def close(first, second):
    return math.isclose(first, second, rel_tol=1e-4, abs_tol=1e-4)


info = ask("/tokenizer_info")
(bos,) = tokenize(info["bos_token"])
model = LocalCompletionsAPI(base_url=f"{fleet.url}/v1/completions", model=fleet.model, auth_token=fleet.key,
                            custom_prefix_token_id=bos, max_length=info["model_max_length"], num_concurrent=2)
assert model.tokenizer_backend == "remote", "lm-eval did not find the tokenizer of the server"
assert model.tokenizer.eos_token == info["eos_token"] and tokenize(info["eos_token"]) == [model.eot_token_id]
assert info["chat_template"] == (pathlib.Path(__file__).parent / "chat.jinja").read_text(), info

for pair, (logprob, is_greedy) in zip(PAIRS, model.loglikelihood(requests("loglikelihood", PAIRS)), strict=True):
    expected, expected_greedy = score_over_http(*pair)
    assert close(logprob, expected) and is_greedy == expected_greedy, (pair, logprob, expected)

expected = evaluate_with_ballast(TEXT)
(rolling,) = model.loglikelihood_rolling(requests("loglikelihood_rolling", [(TEXT,)]))
assert close(rolling, expected), (rolling, expected)

(generated,) = model.generate_until(requests("generate_until", [
    (fleet.prompt, {"until": [], "max_gen_toks": fleet.max_tokens, "temperature": 0})]))
# lm-eval sends token ids without the special tokens that the model puts around a text.
fields = {"prompt": tokenize(fleet.prompt), "max_tokens": fleet.max_tokens, "temperature": 0}
assert generated == ask("/v1/completions", fields)["choices"][0]["text"], generated

pathlib.Path("task.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
task = {"task": "code", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "task.jsonl"}},
        "test_split": "test", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}]}
results = simple_evaluate(model=model, tasks=[task], bootstrap_iters=0)["results"]["code"]
bits = -expected / math.log(2) / len(TEXT.encode())
assert close(results["bits_per_byte,none"], bits), (results, bits)
