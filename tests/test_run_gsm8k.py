"""run_gsm8k.sh: what it prints, and what it refuses before it downloads anything."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent.parent
OURS = ("No CUDA GPU", "problems, not", "Starting vLLM", "step 0", "Done: ", "out: ", "pods.py: ")


def run(folder: Path, *arguments: str, **environment: str) -> tuple[int, list[str]]:
    """The exit code, and all lines on stdout and stderr; a bar is a line, too."""
    process = subprocess.run(
        ["bash", str(folder / "run_gsm8k.sh"), *arguments],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return process.returncode, [line for line in process.stdout.splitlines() if line.strip()]


@pytest.fixture
def installed() -> None:
    if not (HERE / ".venv" / "installed.txt").exists():
        pytest.skip("no .venv made by run_gsm8k.sh")


def test_a_run_prints_our_own_lines_only_also_in_a_path_with_a_space(installed, tiny, tmp_path):
    folder = tmp_path / "with a space"
    folder.symlink_to(HERE)
    out = f"--output_dir={tmp_path / 'out'}"
    code, lines = run(folder, f"--model={tiny}", "--max_steps=0", "--max_new_tokens=4", out)
    assert code == 0
    for line in lines:
        assert line.strip().startswith(OURS), line


def test_another_locale_does_no_harm(installed):
    locale = dict(LC_ALL="POSIX", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
    code, lines = run(HERE, "--m=0", **locale)
    assert code == 2 and lines[-1] == "pods.py: --m is 0, but must be a number from 1"


@pytest.mark.parametrize(
    "answer, named",
    [
        ("16384, 7.5, 580.65.06", "compute capability 7.5; bf16 needs 8.0"),  # T4
        ("32768, [N/A], 450.1", "compute capability [N/A]"),
        ("24576, 8.6, 550.54.14", "driver is 550.54.14; CUDA 13 needs 580"),
        ("12288, 8.6, 580.65.06", "has 12 GiB; Qwen2.5-0.5B needs 15"),
        ("unknown", "does not tell this GPU's memory"),
    ],
)
def test_a_gpu_that_cannot_do_it_is_refused_in_one_line(answer, named, tmp_path):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{answer}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    code, lines = run(HERE, CUDA_VISIBLE_DEVICES="0", PATH=path)
    assert code == 1 and len(lines) == 1 and named in lines[0] and "demonstration" in lines[0]


def test_a_missing_compiler_is_found_before_the_download(tmp_path):
    for file in ("run_gsm8k.sh", "requirements.txt"):
        shutil.copy(HERE / file, tmp_path)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '16380, 8.6, 580.65.06'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    code, lines = run(tmp_path, CUDA_VISIBLE_DEVICES="0", PATH=path, CC="false")
    assert code == 1 and len(lines) == 1 and "apt install gcc python3-dev" in lines[0]
    assert not (tmp_path / ".venv").exists()


def test_another_system_is_told_what_works(tmp_path):
    (tmp_path / "uname").write_text("#!/bin/sh\necho Darwin\n")
    (tmp_path / "uname").chmod(0o755)
    code, lines = run(HERE, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert code == 1 and len(lines) == 1 and "WSL2" in lines[0] and "docker run" in lines[0]
