"""`deltasync compile`: compile the kernels ahead, so that nothing waits for that on a new machine."""

from __future__ import annotations

import click

from deltasync.tensors import ITEM_BYTES


@click.command("compile")
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice([*ITEM_BYTES]),
    multiple=True,
    default=("bfloat16", "float32"),
    help="A dtype of the model's tensors; may be given several times.",
)
def compile(dtypes: tuple[str, ...]) -> None:
    """Compile the kernels of trainers and replicas for this kind of CPU, and keep them in NUMBA_CACHE_DIR.

    In a Dockerfile: RUN deltasync compile. It takes one or two minutes, and no version waits for the compiler in a container
    of the image. If it runs on other CPUs than the one that builds it, docs/guides/deploy.md says what to set.
    """
    import time

    from deltasync.cli.output import echo, with_bars
    from deltasync.errors import ConfigError
    from deltasync.kernels import compiled
    from deltasync.live import compiling

    if compiled.uncached:
        raise ConfigError(f"Compiled kernels cannot be kept: {compiled.uncached[0]}. {compiled.CURE}")

    def compile_() -> None:
        for is_large in (False, True):
            specs = tuple(spec for dtype in dtypes for spec in compiling.of_dtype(dtype, is_large=is_large))
            for _ in compiling.steps(compiling.Kinds(specs, publishes=True)):
                pass

    began_s = time.perf_counter()
    with_bars(compile_)
    seconds = time.perf_counter() - began_s
    echo(f"compiled {len(compiled.functions)} functions in {seconds:.1f} s; they are kept in {compiled.folder}")
