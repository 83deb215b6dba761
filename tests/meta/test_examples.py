"""Every example runs as a script, ends by itself and prints its results."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOWS = {
    "train_digits.py": r"accuracy on scans that were not trained on: 0\.9[4-9]",
    "stream_http.py": r"epoch 0: 1399 scans",
    "own_dataset.py": r"over HTTP: 200 scans[\s\S]*from files: 200 scans",
    "coco.py": r"epoch 1: 60 photographs, (\d+) of \1 boxes",
    "pretrain_packed.py": r"12 steps: loss 7\.\d+ to [567]\.\d+; \d\.\d% padding; prose 0\.[67]\d?, code 0\.[234]",
    "finetune_chat.py": r"12 steps: loss 7\.\d+ to [3456]\.\d+; \d\d?% padding",
    "image_text_pairs.py": r"epoch 1: 43 batches, (100|\d\d)% of the last named right",
    "video_clips.py": r"the last epoch: 120 clips of 20 stretches, (100|[5-9]\d)% .* right",
    "async_trainer.py": r"dashboard: [\s\S]*22 steps, the last loss \d",
}


def test_every_example_is_run() -> None:
    assert set(SHOWS) == {path.name for path in EXAMPLES.glob("*.py")} - {"digits.py"}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SHOWS)
def test_example_prints_its_results(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "--quick"],
        capture_output=True, text=True, timeout=290, cwd=tmp_path, env=os.environ | {"PYTHONWARNINGS": "default"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(SHOWS[name], done.stdout), done.stdout + done.stderr
    assert not re.search(r"Traceback|headrace.*Warning", done.stderr), done.stderr
    assert list(tmp_path.iterdir()) == []
