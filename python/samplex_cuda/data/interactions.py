"""Which items each user took: histories in, items out."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from samplex_cuda._checks import check_int
from samplex_cuda.data.base import Array, Dataset, _as_array, _check_indptr, _gather, _Labels, _long, _pad

__all__ = ["Interactions"]


class Interactions(Dataset):
    """Which items each user took, in order: predict an item from the ones before it.

    Row r is one interaction of one user: "y" int64 [B] is the item, "history" int64 [B, T] the items before it, most
    recent last, padded with -1 at the front, "user" int64 [B]. The first `min_history` items of a user are not targets.

    With `targets` (a test set) a row is a user who has some: "history" ends with the last known item, and "y" is
    [B, P], padded with -100.

    Args:
        indptr: [U + 1], where the items of each user begin.
        items: item ids.
        num_items: C.
        history: T, how many items back a row looks.
        min_history: how many items a user must have before a target; 0 keeps rows without a history.
        order: "time": the history of an item is what came before it. "none": the items of a user are a set; the history
            of an item is the other ones (of more than T, the T that follow it in the list, going round).
        targets: (indptr [U + 1], items): what is to be predicted for each user.

    Example:
        >>> import numpy as np, torch
        >>> from samplex_cuda import data
        >>> set_ = data.Interactions(np.array([0, 3, 5]), np.array([4, 2, 7, 1, 3]), num_items=8, history=2)
        >>> batch = set_.batch(torch.arange(len(set_)))
        >>> batch["history"].tolist(), batch["y"].tolist(), batch["user"].tolist()
        ([[-1, 4], [4, 2], [-1, 1]], [2, 7, 3], [0, 0, 1])
    """

    kind = "interactions"

    def __init__(
        self,
        indptr: Any,
        items: Any,
        num_items: int,
        history: int = 50,
        *,
        min_history: int = 1,
        order: str = "time",
        targets: tuple[Any, Any] | None = None,
    ) -> None:
        super().__init__()
        where = "Interactions"
        self.indptr = _as_array(where, "indptr", indptr, (1,), "iu")
        self.items = _as_array(where, "items", items, (1,), "iu")
        self.num_classes = self.num_features = check_int(where, "num_items", num_items, 1)
        self.history = check_int(where, "history", history, 1)
        self.min_history = check_int(where, "min_history", min_history, 0)
        if order not in ("time", "none"):
            raise ValueError(f"{where}: order must be 'time' or 'none', got {order!r}")
        self.order = order
        _check_indptr(where, "indptr", self.indptr, len(self.items))
        self._check_items("items", self.items)
        self.num_users = len(self.indptr) - 1
        self._targets: _Labels | None = None
        if targets is None:
            lengths = np.diff(np.asarray(self.indptr, dtype=np.int64))
            # In a set no place is before another: every item is a target where the others are enough.
            self._skip = self.min_history if order == "time" else 0
            self._ends = np.cumsum(np.where(lengths > self.min_history, lengths - self._skip, 0))  # rows up to a user
            return
        ends = _as_array(where, "targets", targets[0], (1,), "iu")
        ids = _as_array(where, "targets", targets[1], (1,), "iu")
        if len(ends) != self.num_users + 1:
            raise ValueError(f"{where}: targets must have {self.num_users + 1} offsets to fit indptr, got {len(ends)}")
        _check_indptr(where, "targets", ends, len(ids))
        self._check_items("targets", ids)
        self._targets = _Labels(where, "all", indptr=ends, ids=ids)
        self._users = np.flatnonzero(np.diff(ends) > 0)
        self.multi_label = True

    def with_targets(self, test: Interactions) -> Interactions:
        """A data set for evaluation: what `test` has of each user is to be predicted from what is known here.

        Args:
            test: interactions of the same users with the same items; it may know fewer or more users.

        Returns:
            `Interactions` with `targets`: a row for each user who has some.

        Example:
            >>> import numpy as np, torch
            >>> from samplex_cuda import data
            >>> train = data.Interactions(np.array([0, 3, 5]), np.array([4, 2, 7, 1, 3]), num_items=8, history=2)
            >>> test = data.Interactions(np.array([0, 0, 2]), np.array([6, 5]), num_items=8)
            >>> batch = train.with_targets(test).batch(torch.tensor([0]))
            >>> batch["user"].tolist(), batch["history"].tolist(), batch["y"].tolist()
            ([1], [[1, 3]], [[6, 5]])
        """
        if test.num_classes > self.num_classes:
            want = f"at most {self.num_classes}"
            raise ValueError(f"Interactions.with_targets: test must have {want} items, got {test.num_classes}")
        users = max(self.num_users, test.num_users)
        known, asked = (
            np.concatenate([a, np.full(users + 1 - len(a), a[-1])]) if len(a) <= users else a
            for a in (np.asarray(self.indptr), np.asarray(test.indptr))
        )
        found = Interactions(
            known,
            self.items,
            self.num_classes,
            self.history,
            min_history=self.min_history,
            order=self.order,
            targets=(asked, test.items),
        )
        found.notes = [*self.notes, *test.notes]
        found.columns_said = test.columns_said
        return found

    def _check_items(self, name: str, items: Array) -> None:
        for begin in range(0, len(items), 1 << 22):
            part = items[begin : begin + (1 << 22)]
            if not (int(part.min()) >= 0 and int(part.max()) < self.num_classes):
                wrong = part[(part < 0) | (part >= self.num_classes)][0]
                raise ValueError(f"Interactions: {name} must be in [0, {self.num_classes}), got {wrong}")

    @property
    def num_interactions(self) -> int:
        """How many (user, item) pairs there are."""
        return len(self.items)

    def __len__(self) -> int:
        """Number of targets; with `targets`, of users who have some."""
        if self._targets is not None:
            return len(self._users)
        return int(self._ends[-1]) if len(self._ends) else 0

    def _place(self, found: Array) -> tuple[Array, Array]:
        """User, and place of the target among the items."""
        user = np.searchsorted(self._ends, found, side="right")
        before = np.where(user > 0, self._ends[user - 1], 0)
        return user, np.asarray(self.indptr[user], dtype=np.int64) + self._skip + (found - before)

    def users(self, rows: Tensor) -> Tensor:
        """The user of each row.

        Args:
            rows: int64 [B], in [0, len).

        Returns:
            int64 [B].

        Example:
            >>> import numpy as np, torch
            >>> from samplex_cuda import data
            >>> set_ = data.Interactions(np.array([0, 3, 5]), np.array([4, 2, 7, 1, 3]), num_items=8)
            >>> set_.users(torch.tensor([0, 2]))
            tensor([0, 1])
        """
        found = self._rows(rows)
        return _long(self._users[found] if self._targets is not None else self._place(found)[0])

    def seen(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Every known item that is not a target of each row, however long ago: what a recommendation leaves out.

        With `targets`: all items of the user. Else: the items before the target (order="none": all the others).

        Args:
            rows: int64 [B], in [0, len).

        Returns:
            CSR pair (offsets int64 [B + 1], ids int64).

        Example:
            >>> import numpy as np, torch
            >>> from samplex_cuda import data
            >>> set_ = data.Interactions(np.array([0, 3, 5]), np.array([4, 2, 7, 1, 3]), num_items=8, history=1)
            >>> set_.seen(torch.tensor([1, 2]))
            (tensor([0, 2, 3]), tensor([4, 2, 1]))
        """
        found = self._rows(rows)
        if self._targets is not None:
            user, place = self._users[found], None
        else:
            user, place = self._place(found)
        starts = np.asarray(self.indptr[user], dtype=np.int64)
        ends = np.asarray(self.indptr[user + 1], dtype=np.int64)
        if place is not None and self.order == "time":
            ends = place
        where = _gather(starts, ends - starts)
        keep = np.ones(len(where), dtype=bool)
        lengths = ends - starts
        if place is not None and self.order == "none":
            keep = where != np.repeat(place, lengths)
            lengths = lengths - 1
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return _long(offsets), _long(self.items[where[keep]])

    def known(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """Every other item of the row's user, before and after the target; see `Dataset.known`.

        Example:
            >>> import numpy as np, torch
            >>> from samplex_cuda import data
            >>> set_ = data.Interactions(np.array([0, 3, 5]), np.array([4, 2, 7, 1, 3]), num_items=8, history=1)
            >>> set_.known(torch.tensor([0, 2]))
            (tensor([0, 2, 3]), tensor([4, 7, 1]))
        """
        return self._known_but(rows, None)

    def _known_but(self, rows: Tensor, used: Array | None) -> tuple[Tensor, Tensor]:
        """As `known`; `used` bool [len] says which rows are in use: items that only other rows predict stay unknown."""
        found = self._rows(rows)
        if self._targets is not None:
            user, place = self._users[found], np.full(len(found), -1)
        else:
            user, place = self._place(found)
        starts = np.asarray(self.indptr[user], dtype=np.int64)
        lengths = np.asarray(self.indptr[user + 1], dtype=np.int64) - starts
        where = _gather(starts, lengths)
        row = np.repeat(np.arange(len(found)), lengths)
        keep = where != place[row]
        if used is not None and self._targets is None:
            # The row whose target this place is: none for the first items of a user, or of one who has too few.
            owner = user[row]
            before = np.where(owner > 0, self._ends[owner - 1], 0)
            number = before + where - starts[row] - self._skip
            is_target = (number >= before) & (number < self._ends[owner])
            keep &= ~is_target | used[np.where(is_target, number, 0)]
        offsets = np.concatenate([[0], np.cumsum(np.bincount(row[keep], minlength=len(found)))])
        return _long(offsets), _long(self.items[where[keep]])

    def targets(self, rows: Tensor) -> Tensor:
        """See `Dataset.targets`."""
        found = self._rows(rows)
        if self._targets is not None:
            y = self._targets.get(self._users[found])
            return _long(y if y.ndim == 2 else y[:, None])
        return _long(self.items[self._place(found)[1]])

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """See `Dataset.batch`."""
        found = self._rows(rows)
        if self._targets is not None:
            user = self._users[found]
            end = np.asarray(self.indptr[user + 1], dtype=np.int64)
        else:
            user, end = self._place(found)
        start = np.asarray(self.indptr[user], dtype=np.int64)
        if self.order == "none" and self._targets is None:
            size = np.asarray(self.indptr[user + 1], dtype=np.int64) - start
            lengths = np.minimum(size - 1, self.history)
            step = _gather(np.ones_like(lengths), lengths)  # 1, 2, ... beyond the target
            where = np.repeat(start, lengths) + (np.repeat(end - start, lengths) + step) % np.repeat(size, lengths)
        else:
            lengths = np.minimum(end - start, self.history)
            where = _gather(end - lengths, lengths)
        history = _pad(self.items[where], lengths, -1, self.history, front=True)
        return {"index": rows, "y": self.targets(rows), "history": _long(history), "user": _long(user)}

    def _parts(self) -> dict[str, Any]:
        found: dict[str, Any] = {"indptr": self.indptr, "items": self.items, "history": self.history}
        found |= {"min_history": self.min_history, "order": self.order}
        return found if self._targets is None else found | self._targets.parts()
