"""`deltasync bench`: speed and size on this machine."""

from __future__ import annotations

import json

import click


@click.group("bench")
def command() -> None:
    """Measure speed and size on this machine."""


@command.command("codec")
@click.option(
    "--changed",
    "fractions",
    multiple=True,
    type=click.FloatRange(1e-5, 0.5),
    default=(0.005, 0.01, 0.02, 0.05),
    show_default=True,
    help="Changed fraction; may be given several times.",
)
@click.option("--elements", type=click.IntRange(min=1000), default=1 << 24, show_default=True, help="Size of the tensor.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def codec_command(fractions: tuple[float, ...], elements: int, as_json: bool) -> None:
    """Bits per changed element and throughput of each codec, on simulated deltas."""
    from deltasync.bench import codec

    result = codec.run(list(fractions), elements)
    if as_json:
        click.echo(json.dumps(result, indent=2))
        return
    click.echo(f"{result['machine']}; memcpy {result['memcpy_gb_s']:.1f} GB/s read + written; {elements:,} bf16 elements")
    click.echo(
        f"{'codec':8} {'changed':>8} {'bits/changed':>13} {'diff+encode GB/s':>17} {'of memcpy':>10} {'apply M/s':>10}"
    )
    for row in result["rows"]:
        click.echo(
            f"{row['codec']:8} {row['changed_fraction']:8.2%} {row['bits_per_changed']:13.2f} {row['encode_gb_s']:17.2f} "
            f"{row['encode_gb_s'] / result['memcpy_gb_s']:10.0%} {row['apply_changed_per_s'] / 1e6:10.1f}"
        )
