"""The snippets of the project's pages."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "hls_kernels/README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]

CUDA_HERE = "cpu"  # the device that replaces GPUs that a page names


@dataclass(frozen=True)
class Snippet:
    page: Path
    line: int  # the line of its opening fence
    language: str
    text: str

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self):
        """Return the snippet's commands without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in (re.sub(r"(^|\s)#.*", "", line).rstrip() for line in lines) if line]

    def execute(self, names, directory):
        code = self.text.replace("/mnt/", f"{directory}/").replace("cuda:0", CUDA_HERE)
        exec(compile("\n" * self.line + code, self.page, "exec"), names)


def snippets(*languages):
    for page in PAGES:
        text = page.read_text()
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            if found[1] in languages:
                yield Snippet(page, text.count("\n", 0, found.start()) + 1, found[1], found[2])


def on_page(name, text=""):
    """Return the only snippet of a page that contains this text."""
    (found,) = (s for s in snippets("python") if s.page == ROOT / name and text in s.text)
    return found


RECIPES = [s for s in snippets("python") if s.page.parent.name == "recipes"]
ON_RANKS = [s for s in snippets("python") if s.page.name == "distributed.md" and 'torch.load("state.pt"' not in s.text]
SCRIPTS = [s for s in [*ON_RANKS, *RECIPES] if s.text.startswith("# ") and "init_process_group()" in s.text]
