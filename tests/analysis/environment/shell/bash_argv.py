"""What bash itself gives to commands: programs that stand first in PATH write down their words."""

import os
import subprocess

PROGRAMS = ("torchrun", "python", "python3", "deepspeed", "accelerate", "msrun", "mpirun", "srun", "run")
# One write for a record: programs of one pipeline write at the same time.
_RECORDER = r"""
__record() { local IFS=; printf '%s\0' "$__script" "$@" $'\001' >> "$__out"; }
"""


def argv_of_bash(scripts, folder, environ):
    """Return, script by script, the words of each program that it starts; all scripts in one process of bash.

    A script runs in a subshell, where functions stand in for the programs: nothing is started.
    """
    paths = []
    for number, text in enumerate(scripts):
        path = folder / f"script{number}.sh"
        path.write_text(text)
        paths.append(path)
    programs = "".join(f'{name}() {{ __record {name} "$@"; }}\n' for name in PROGRAMS)
    runs = "".join(
        f"( __script={number}; . {path} ) > /dev/null 2>&1 < /dev/null\n" for number, path in enumerate(paths)
    )
    out = folder / "argv"
    out.write_bytes(b"")
    driver = folder / "driver.sh"
    driver.write_text(_RECORDER + programs + runs)
    subprocess.run(["bash", "--norc", str(driver)], env={**environ, "__out": str(out), "PATH": os.environ["PATH"]},
                   check=False, timeout=60, cwd=folder)  # fmt: skip
    found = [[] for _ in scripts]
    for record in out.read_bytes().split(b"\1\0"):
        words = [word.decode() for word in record.split(b"\0")[:-1]]
        if words:
            found[int(words[0])].append(words[1:])
    return found
