"""Workers have all chains, whenever they start, and receive a chain again only after a change."""

from __future__ import annotations

from contextlib import closing

import pytest

from headrace.errors import LoaderClosedError
from headrace.workers.chains import Chains, KnownChain, PackedChain, SharedChain
from headrace.workers.tasks import Chain, Message, SpecMessage, Step


class Link:
    """A worker that records what it receives."""

    def __init__(self) -> None:
        self.chains, self.specs = dict[int, SharedChain](), dict[int, bytes]()

    def send(self, message: Message) -> None:
        assert isinstance(message, SpecMessage)
        self.specs[message.chain] = message.spec

    def learn(self, number: int, chain: SharedChain) -> None:
        self.chains[number] = chain
        self.specs.pop(number, None)


def times(factor: list[int]) -> Chain:
    return Chain((Step("map(times)", "map", lambda n: n * factor[0]),))


@pytest.mark.parametrize("shares_objects", [True, False])
def test_worker_that_starts_later_has_the_same_chains(shares_objects: bool) -> None:
    links, chain = [Link()], times([2])
    with closing(Chains(lambda: links, shares_memory=True, shares_objects=shares_objects, modules={})) as chains:
        chains.learn(1, chains.pack(chain))
        chains.learn(2, chains.pack(chain))
        chains.learn_spec(1, b"form")
        links.append(Link())
        chains.tell(links[1])
        assert links[1].chains == links[0].chains
        assert [link.specs for link in links] == [{1: b"form"}] * 2
        assert [link.chains[1].load().steps[0].fn(4) for link in links] == [8, 8]
        chains.learn(1, chains.pack(chain))  # an older one is forgotten, and the form of its samples too
        links.append(Link())
        chains.tell(links[2])
        assert [link.specs for link in links] == [{}, {}, {}]


def test_changed_chain_is_packed_again() -> None:
    link, factor = Link(), [2]
    with closing(Chains(lambda: [link], shares_memory=True, shares_objects=False, modules={})) as chains:
        chain = times(factor)
        packed = chains.pack(chain)
        assert isinstance(packed, PackedChain)
        chains.learn(1, packed)
        chains.learn_spec(1, b"form")
        assert chains.pack_changed(1, chain) is None
        for is_in_use, form in ((True, {1: b"form"}), (False, {})):
            factor[0] += 1
            changed = chains.pack_changed(1, chain)
            assert changed is not None
            chains.learn_changed(1, changed, is_in_use=is_in_use)
            assert link.chains[1].load().steps[0].fn(4) == 4 * factor[0]
            assert link.specs == form


def test_chain_of_thread_workers_is_not_kept_alive() -> None:
    chain = times([2])
    known = KnownChain(chain)
    assert known.load() is chain
    del chain
    with pytest.raises(LoaderClosedError):
        known.load()
    with pytest.raises(TypeError):
        known.message(1)
