#!/bin/sh
# torch 2.13.0: on a CPU, torch.compile needs the command openssl, besides a C++ compiler.
#
# Inductor compiles the headers of its kernels once and keeps them for later. To find out whether they have changed,
# it runs the command openssl for their SHA-512, without an alternative. In a small container with g++ and Python,
# whose hashlib needs no command, the first compiled function ends with FileNotFoundError.
# TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS=0 does without, and each kernel takes two to four times as long.
# Guess: what torch.compile needs on a CPU is a C++ compiler.
# Output seen: with openssl: compiled; without: FileNotFoundError: [Errno 2] No such file or directory: 'openssl';
# without, headers not compiled before: compiled
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.3.5
cd "$folder"
# The commands of this machine but openssl.
mkdir commands
for command in g++ gcc cc as ld ar sh env uname mkdir rm cat; do
  path=$(command -v "$command") && ln -s "$path" "commands/$command"
done
cat > compiled.py <<'PYTHON'
import torch

try:
    torch.compile(torch.exp)(torch.zeros(2))
    print("compiled")
except Exception as error:
    print(str(error).splitlines()[0])
PYTHON
run() {
  TORCHINDUCTOR_CACHE_DIR="$folder/$1" PATH="$2" TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS="$3" \
    "$folder/venv/bin/python" compiled.py 2> /dev/null
}
with=$(run with "$PATH" 1)
without=$(run without "$folder/commands" 1)
uncached=$(run uncached "$folder/commands" 0)
echo "with openssl: $with; without: $without; without, headers not compiled before: $uncached"
[ "$with" = compiled ]
case "$without" in *"No such file or directory: 'openssl'"*) ;; *) exit 1 ;; esac
[ "$uncached" = compiled ]
