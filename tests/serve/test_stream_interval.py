"""--stream-interval: fewer chunks, the same text."""

from pathlib import Path

import httpx
from serving import Server, events, user

CHAT = {"messages": user("Count"), "max_tokens": 25, "ignore_eos": True, "temperature": 0, "stream": True, "n": 2}


def test_chunks_have_so_many_tokens(tmp_path: Path) -> None:
    with Server(tmp_path, "--stream-interval", "8") as own:
        own.wait_until_ready()
        url = own.url + "/v1/chat/completions"
        whole = httpx.post(url, json=CHAT | {"stream": False}, timeout=60).json()["choices"]
        with httpx.stream("POST", url, json=CHAT | {"return_token_ids": True}, timeout=60) as response:
            chunks = [choice for event in events(response) for choice in event["choices"]]
        for index in (0, 1):
            mine = [choice for choice in chunks if choice["index"] == index]
            assert "".join(each["delta"].get("content", "") for each in mine) == whole[index]["message"]["content"]
            counts = [len(each.get("token_ids") or ()) for each in mine]
            assert sum(counts) == 25
            assert all(count >= 8 for count in [count for count in counts if count][1:-1])
            assert len([count for count in counts if count]) <= 5
