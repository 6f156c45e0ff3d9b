from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetune.data.store import TokenStore
from fleetune.spec.errors import UserError

MakeStore = Callable[..., TokenStore]
reuse = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)


def rows_of(store: TokenStore) -> Counter[str]:
    return Counter(sample for sequence in range(store.num_sequences) for sample in store.sample_ids([sequence]))


@reuse
@given(lengths=st.lists(st.integers(2, 16), min_size=1, max_size=80), seed=st.integers(0, 9), packing=st.booleans())
def test_packed_rows_are_the_same_rows(make_store: MakeStore, lengths: list[int], seed: int, packing: bool) -> None:
    store = make_store(lengths, seed=seed, packing=packing)
    assert rows_of(store) == {f"f0:{row}": 1 for row in range(1, len(lengths) + 1)}
    sizes = [
        sum(int(store.documents[entry["document"]]["length"]) for entry in store.entries_of(sequence))
        for sequence in range(store.num_sequences)
    ]
    assert max(sizes) <= 16
    assert sum(sizes) == sum(lengths) == store.num_tokens
    if not packing:
        assert store.num_sequences == len(lengths)


def test_more_rows_than_one_block_are_all_there(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetune.data.documents.BLOCK", 16)
    store = make_store([3 + row % 30 for row in range(200)], over_long="split", weights=(2.0,))
    copies = [Counter(sample.split("#")[0] for sample in rows_of(store) if sample.count(":") == again) for again in (1, 2)]
    assert set(copies[0]) == {f"f0:{row}" for row in range(1, 201)}
    assert copies[1] == {f"{row}:1": pieces for row, pieces in copies[0].items()}
    assert store.bounds[-1] == len(store.entries) == 2 * store.num_documents
    assert (np.diff(store.bounds) > 0).all()


@pytest.mark.parametrize("length", [17, 31, 32, 46, 47, 100])
def test_a_split_row_trains_each_of_its_trained_tokens_once(make_store: MakeStore, length: int) -> None:
    store = make_store([length], over_long="split", in_order=True)
    trained: list[int] = []
    for number in range(store.num_documents):
        tokens, is_trained = store.document(number)
        assert len(tokens) <= 16
        assert not is_trained[0]
        assert is_trained.sum() == store.documents[number]["trained"]
        trained += tokens[is_trained].tolist()
    assert trained == [1000 + index for index in range(max(1, length // 3), length)]


def test_pieces_are_named_by_row_and_piece(make_store: MakeStore) -> None:
    store = make_store([5, 40], over_long="split", in_order=True)
    names = [store.sample_id(number) for number in range(store.num_documents)]
    assert names[0] == "f0:1"
    assert all(name.startswith("f0:2#") for name in names[1:])
    assert len(set(names)) == len(names)


def test_a_piece_without_anything_to_learn_is_left_out_and_counted(make_store: MakeStore) -> None:
    store = make_store([99], over_long="split")  # trained from token 33 on: the first two pieces of 16 have nothing
    assert store.manifest["report"]["pieces_without_trained"] == 2
    assert all(store.documents["trained"] > 0)


def test_a_cut_row_keeps_its_beginning(make_store: MakeStore) -> None:
    store = make_store([20], over_long="cut")
    tokens, trained = store.document(0)
    assert tokens.tolist() == [1000 + index for index in range(16)]
    assert trained.sum() == 10
    assert store.manifest["report"]["cut"] == 1


def test_a_row_whose_answer_is_cut_off_is_left_out_and_counted(make_store: MakeStore) -> None:
    store = make_store([60, 9], over_long="cut")
    assert rows_of(store) == {"f0:2": 1}
    assert store.manifest["report"]["answers_cut_off"] == 1


def test_over_long_rows_are_dropped_and_counted(make_store: MakeStore) -> None:
    store = make_store([5, 17, 16, 40])
    assert rows_of(store) == {"f0:1": 1, "f0:3": 1}
    assert store.manifest["report"]["dropped"] == 2


def test_over_long_rows_may_be_an_error_that_names_them(make_store: MakeStore) -> None:
    with pytest.raises(UserError, match=r"1 rows are longer.*/f0, row 2 \(17 tokens\)"):
        make_store([5, 17], over_long="error")


def test_text_is_split_whatever_is_asked_unless_it_may_not_be(make_store: MakeStore) -> None:
    for policy in ("drop", "cut", "split"):
        assert make_store([40], texts=True, over_long=policy).num_documents > 1
    with pytest.raises(UserError, match="over-long error"):
        make_store([40], texts=True, over_long="error")


def test_only_over_long_rows_are_an_error_that_says_how_long(make_store: MakeStore) -> None:
    with pytest.raises(UserError, match=r"all 2 are longer than sequence_length 16 \(the longest has 40 tokens\)"):
        make_store([30, 40])


@pytest.mark.parametrize(("weight", "expected"), [(1.0, 40), (2.0, 80), (0.5, 20), (2.25, 90), (0.01, 0)])
def test_an_epoch_holds_each_row_as_often_as_its_weight_says(make_store: MakeStore, weight: float, expected: int) -> None:
    store = make_store([4] * 50, sources=[0] * 40 + [1] * 10, weights=(weight, 1.0))
    rows = rows_of(store)
    first = Counter(sample.split(":")[1] for sample in rows if sample.startswith("f0:"))
    assert sum(first.values()) == expected
    assert all(int(weight) <= first.get(str(row), 0) <= int(weight) + 1 for row in range(1, 41))
    assert sum(count for sample, count in rows.items() if sample.startswith("f1:")) == 10
    assert set(rows.values()) == {1}, "each copy has an id of its own"


def test_which_rows_a_fraction_takes_depends_on_the_seed_alone(make_store: MakeStore) -> None:
    chosen = [frozenset(rows_of(make_store([4] * 60, weights=(0.5,), seed=seed))) for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]


@reuse
@given(num_rows=st.integers(2, 60), share=st.floats(0.01, 0.95), seed=st.integers(0, 3))
def test_held_out_rows_and_the_others_are_all_rows_and_share_none(
    make_store: MakeStore, num_rows: int, share: float, seed: int
) -> None:
    wanted = max(1, round(share * num_rows))
    options = {"held_out_share": share, "seed": seed}
    if wanted >= num_rows:
        with pytest.raises(UserError, match="leaves none left to train on"):
            make_store([4] * num_rows, **options)
        return
    kept = set(rows_of(make_store([4] * num_rows, **options)))
    held_out = set(rows_of(make_store([4] * num_rows, **options, held_out=True, in_order=True)))
    assert len(held_out) == wanted
    assert not kept & held_out
    assert kept | held_out == {f"f0:{row}" for row in range(1, num_rows + 1)}


def test_the_order_depends_on_seed_and_content_alone(make_store: MakeStore) -> None:
    def order(store: TokenStore) -> tuple[str, ...]:
        return store.sample_ids(range(store.num_sequences))

    lengths = [3 + row % 9 for row in range(60)]
    assert order(make_store(lengths)) == order(make_store(lengths))
    assert order(make_store(lengths)) != order(make_store(lengths, seed=1))
    assert order(make_store(lengths)) != order(make_store([*lengths, 3]))[:60]


def test_the_fingerprint_tells_what_a_run_reads(make_store: MakeStore) -> None:
    lengths = [3 + row % 9 for row in range(30)]
    same = {make_store(lengths).fingerprint for _ in range(2)}
    others = {
        make_store(lengths, seed=1).fingerprint,
        make_store(lengths[:-1]).fingerprint,
        make_store(lengths, packing=False).fingerprint,
        make_store(lengths, sequence_length=20).fingerprint,
    }
    assert len(same) == 1
    assert len(others | same) == 5


@pytest.mark.parametrize("name", ["documents.bin", "entries.bin", "bounds.bin", "manifest.json"])
def test_a_torn_store_is_refused_with_the_file_and_the_fix(make_store: MakeStore, name: str) -> None:
    store = make_store([4] * 10)
    path = store.folder / name
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match="run the same command again"):
        TokenStore.open(store.folder)


def test_a_store_whose_rows_were_deleted_is_refused(make_store: MakeStore) -> None:
    store = make_store([4] * 10)
    (store.rows.folder / "tokens.bin").unlink()
    with pytest.raises(UserError, match=r"tokens\.bin"):
        TokenStore.open(store.folder)


def test_sequences_are_told_by_their_number_of_tokens_the_longest_first(make_store: MakeStore) -> None:
    store = make_store([5, 16, 9, 16, 12], packing=False)
    tokens = [int(store.documents["length"][store.entries_of(number)["document"]].sum()) for number in range(5)]
    order = store.longest_first()
    assert [tokens[number] for number in order] == [16, 16, 12, 9, 5] and sorted(order) == list(range(5))
    assert order[0] < order[1], "equal ones keep their order"
