"""Completion for a shell: prints a script to be read by it.

bash   eval "$(vllm-kvcompress completion bash)"     in ~/.bashrc
zsh    eval "$(vllm-kvcompress completion zsh)"      in ~/.zshrc, after compinit
fish   vllm-kvcompress completion fish | source      in ~/.config/fish/config.fish
"""

from __future__ import annotations

import argparse
import json

SHELLS = ("bash", "zsh", "fish")

BASH = """\
_vllm_kvcompress() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
    case ${{COMP_WORDS[1]}}:$before in
{choices}
    esac
    if [[ -z $words && $COMP_CWORD -eq 1 ]]; then
        words='{commands}'
    elif [[ -z $words && $word == -* ]]; then
        case ${{COMP_WORDS[1]}} in
{options}
        esac
    fi
    if [[ -n $words ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -o bashdefault -F _vllm_kvcompress vllm-kvcompress
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.add_argument("shell", choices=SHELLS)


def run(arguments: argparse.Namespace) -> int:
    """Print the script; in JSON what can be completed."""
    known = commands()
    if arguments.json:
        print(json.dumps(known))
    elif arguments.shell == "fish":
        print(fish_script(known), end="")
    else:
        # zsh runs the script of bash by its own compatibility.
        zsh = "autoload -U +X bashcompinit && bashcompinit\n"
        print((zsh if arguments.shell == "zsh" else "") + bash_script(known), end="")
    return 0


def commands() -> dict[str, dict[str, list[str]]]:
    """Per command its options and the values that each can have; ``""``: what stands alone."""
    from vllm_kvcompress.cli import build_parser

    found: dict[str, dict[str, list[str]]] = {}
    (subparsers,) = (
        action
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    for name, parser in subparsers.choices.items():
        found[name] = {}
        for action in parser._actions:
            values = [str(choice) for choice in action.choices or ()]
            for option in action.option_strings or [""] * bool(values):
                found[name][option] = values
    return found


def bash_script(known: dict[str, dict[str, list[str]]]) -> str:
    """For bash, and for zsh with ``bashcompinit``."""
    choices, options = [], []
    for command, of_command in known.items():
        for option, values in of_command.items():
            if values:
                pattern = f"{command}:{option or command}"
                choices.append(f"        {pattern}) words='{' '.join(values)}' ;;")
        words = " ".join(option for option in of_command if option)
        options.append(f"            {command}) words='{words}' ;;")
    return BASH.format(
        choices="\n".join(choices), options="\n".join(options), commands=" ".join(known)
    )


def fish_script(known: dict[str, dict[str, list[str]]]) -> str:
    """For fish."""
    start = "complete -c vllm-kvcompress"
    lines = [f"{start} -n __fish_use_subcommand -f -a '{' '.join(known)}'"]
    for command, of_command in known.items():
        inside = f"{start} -n '__fish_seen_subcommand_from {command}'"
        for option, values in of_command.items():
            if not option:
                lines.append(f"{inside} -f -a '{' '.join(values)}'")
                continue
            flag = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            lines.append(f"{inside} {flag}" + (f" -x -a '{' '.join(values)}'" if values else ""))
    return "\n".join(lines) + "\n"
