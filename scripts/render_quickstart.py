"""Make docs/images/quickstart.svg, the README's picture: a terminal after a real `shardwise train quickstart`.

The run happens here and now, on a pseudo-terminal; arguments of this script go to the command. The control sequences
that move the cursor are replayed, so that the picture has the progress display's last state and not all its frames.
"""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
IMAGE = ROOT / "docs" / "images" / "quickstart.svg"
COLUMNS = 110

# Text, or one of the controls that progress displays use: cursor movement and erasure (CSI), \r and \n.
TOKEN = re.compile(
    r"\x1b\[(?P<arguments>[0-9;?]*)(?P<verb>[A-Za-z])|\x1b[^\[]|(?P<control>[\r\n])|(?P<text>[^\x1b\r\n]+)"
)


def run_on_terminal(command: list[str]) -> str:
    """What `command` writes to a terminal of COLUMNS columns; it is shown here too, as it comes.

    Raises:
        SystemExit: with the command's exit code, when it fails.
    """
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 60, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    output = bytearray()
    while True:
        try:
            chunk = os.read(controller, 65536)
        except OSError:  # Linux: the last process that had the terminal open is gone
            break
        if not chunk:
            break
        output += chunk
        sys.stdout.buffer.write(chunk)
        sys.stdout.flush()
    os.close(controller)
    if code := process.wait():
        sys.exit(code)
    return output.decode("utf-8", errors="replace")


def last_state(output: str) -> str:
    """The lines that a terminal shows at the end, with their colours.

    A line that the cursor returns to is written anew from its start: that is how progress displays redraw.
    """
    lines, row, rewrite = [""], 0, False
    for token in TOKEN.finditer(output):
        if token["control"] == "\n":
            row, rewrite = row + 1, False
            if row == len(lines):
                lines.append("")
        elif token["control"] == "\r":
            rewrite = True
        elif token["verb"] == "A":
            row = max(0, row - int(token["arguments"] or 1))
        elif token["verb"] == "K":
            lines[row] = ""
        elif token["text"] or token["verb"] == "m":
            if rewrite:
                lines[row], rewrite = "", False
            lines[row] += token[0]
    return "\n".join(lines).rstrip()


def picture(screen: str, title: str) -> str:
    """An SVG of the screen that needs nothing from elsewhere: the export's web fonts give way to the reader's own."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(screen), soft_wrap=False)
    svg = console.export_svg(title=title)
    svg = re.sub(r"@font-face\s*{[^}]*}\s*", "", svg)
    return svg.replace("font-family: Fira Code,", "font-family: ui-monospace, Menlo, Consolas,")


def main() -> None:
    arguments = ["train", "quickstart", *sys.argv[1:]]
    output = run_on_terminal([str(Path(sys.executable).with_name("shardwise")), *arguments])
    IMAGE.parent.mkdir(parents=True, exist_ok=True)
    screen = last_state(output).replace(str(ROOT), "/home/user")
    IMAGE.write_text(picture(screen, " ".join(["shardwise", *arguments])), encoding="utf-8")
    print(f"wrote {IMAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
