# SPDX-License-Identifier: Apache-2.0
"""The types of the package of clients/python, as a strict mypy of its users sees them."""
import pathlib
import subprocess
import sys

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "clients" / "python" / "examples" / "stream.py"
WRONG = '''from ballast_client import Client, GenerateRequest

GenerateRequest("x", max_tokens="many")
for event in Client("http://x").generate(GenerateRequest("x")):
    event.text
'''


def check(file):
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", "mypy-cache", file]
    return subprocess.run(command, capture_output=True, text=True)


right = check(EXAMPLE)
assert right.returncode == 0, right.stdout
pathlib.Path("wrong.py").write_text(WRONG)
wrong = check("wrong.py").stdout
# Only one of three events has a text.
assert 'expected "int"' in wrong and 'has no attribute "text"' in wrong, wrong
