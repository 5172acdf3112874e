"""Messages of saves between the front end and the ranks."""

from __future__ import annotations

from sglang_inflight.messages import Call, Done, RankAnswer


class Written(RankAnswer, kw_only=True):
    """The rank's served weights are in the folder. A rank of a further replica writes nothing."""

    weight_version: str
    # None: another replica's rank writes these weights
    digest: str | None = None
    bytes: int = 0


class SaveCall(Call, kw_only=True):
    """Write the served weights into the folder ``path``, beside everything else."""

    answer = Written

    path: str
    save_id: str
    expected_version: str | None = None
    # time limit of a rank's work
    timeout_s: float


class EndSaveCall(Call, kw_only=True):
    """End a save: check that the version is still served, and write the manifest."""

    answer = Done

    path: str
    save_id: str
    manifest: bytes
    timeout_s: float


class DiscardSavedCall(Call, kw_only=True):
    """Delete saved weights, or give up writing them."""

    answer = Done

    path: str
    # None: whatever was saved there
    save_id: str | None = None
    timeout_s: float


class Listens(RankAnswer, kw_only=True):
    """The rank waits for receivers. A rank of a further replica waits for nobody."""

    weight_version: str
    # None: another replica's rank sends these weights
    host: str | None = None
    port: int = 0
    # digest of the served weights, None if it is not known
    digest: str | None = None


class OfferCall(Call, kw_only=True):
    """Send the served weights to whoever has the token, beside everything else."""

    answer = Listens

    offer_id: str
    # a secret
    token: str
    expected_version: str | None = None
    # None: the address of the rank's own machine
    host: str | None = None
    timeout_s: float


class WithdrawCall(Call, kw_only=True):
    """End an offer, and give up its transfers."""

    answer = Done

    offer_id: str
