"""Eight chat prompts of different lengths in one batch through a paged KV cache, and what the memory did."""

from __future__ import annotations

from time import monotonic

from demo_model import demo_model
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from paged_jax import LLM, SamplingParams
from paged_jax.memory_report import MemorySnapshot, block_map, ledger
from paged_jax.outputs import RequestOutput

PROMPTS = [
    "Explain in one sentence what a cache is.",
    "List five fruits.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Summarize in one sentence: The city council met on Tuesday to discuss the new library. After two hours"
    " of debate, members agreed to fund the building, which will stand beside the park and open in two years."
    " Residents had asked for longer opening hours and a room for children, and both are part of the plan.",
    "Give me three tips for sleeping better.",
    "What are the benefits of walking every day?",
    "What is photosynthesis?",
    "Rewrite in simple words: The precipitation is anticipated to commence in the late afternoon.",
]
MAX_TOKENS = 80


def main() -> None:
    console = Console()
    start = monotonic()
    # 256 usable blocks of 16 tokens: reserved by maximum length, they would hold two sequences. Eight prompts
    # need few of the programs that a server compiles ahead, so each is compiled when it is first needed.
    llm = LLM(demo_model(), max_model_len=2048, block_size=16, num_blocks=257, max_num_seqs=8, warm_up=False)
    console.print(f"model loaded in {monotonic() - start:.1f} s")

    start = monotonic()
    outputs, fullest = answer_all(llm)
    seconds = monotonic() - start
    for output in sorted(outputs, key=lambda output: int(output.request_id)):
        cut = " ..." if output.outputs[0].finish_reason == "length" else ""
        console.print(Panel(output.outputs[0].text.strip() + cut, title=PROMPTS[int(output.request_id)][:72]))
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    console.print(
        f"{tokens} tokens for {len(outputs)} prompts in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s"
        " (compiling included; the next start finds the programs on disk)\n"
    )
    totals = llm.engine.totals
    console.print(
        f"{totals.prefix_hit_tokens} of {totals.prefix_queried_tokens} prompt tokens came from the prefix"
        " cache, from a beginning that an earlier prompt had computed\n"
    )
    console.print(ledger(fullest, llm.kv_shape, max_model_len=llm.max_model_len))
    console.print("\nphysical blocks at that step, one character each (0 is the null block, . is free)")
    console.print(block_map(fullest))
    free = llm.engine.allocator.num_free_blocks
    console.print(f"after the last answer {free} of {llm.engine.allocator.num_blocks - 1} blocks are free")
    llm.close()


def answer_all(llm: LLM) -> tuple[list[RequestOutput], MemorySnapshot]:
    """Drives the engine step by step, to catch the moment when most blocks are in use."""
    engine = llm.engine
    for index, prompt in enumerate(PROMPTS):
        text = llm.chat_prompt([{"role": "user", "content": prompt}])
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        engine.add(engine.make_request(str(index), text, params))
    finished: list[RequestOutput] = []
    fullest = MemorySnapshot.of(engine.scheduler)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[now]}"))
    with Progress(*columns, TimeElapsedColumn()) as progress:
        task = progress.add_task("generating", total=len(PROMPTS) * MAX_TOKENS, now="")
        while engine.has_unfinished:
            finished += engine.step()
            snapshot = MemorySnapshot.of(engine.scheduler)
            if snapshot.blocks_used > fullest.blocks_used:
                fullest = snapshot
            now = f"{snapshot.blocks_used} blocks, {snapshot.block_utilization:.0%} full"
            progress.update(task, completed=engine.totals.generated_tokens, now=now)
        progress.update(task, completed=len(PROMPTS) * MAX_TOKENS)
    return finished, fullest


if __name__ == "__main__":
    main()
