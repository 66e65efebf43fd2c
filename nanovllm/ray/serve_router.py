"""Our routing in Ray Serve's handles. Imports Ray Serve."""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from nanovllm.ray.server_loads import ServerLoads


class PrefixRouter(RequestRouter):
    """Prefers the server that has least to compute until a request is done, what its prefix cache holds not counted."""

    def initialize_state(self, **options: Any) -> None:
        self._servers = ServerLoads()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Each in a rank of its own, best first."""
        if pending_request is None:
            return [candidate_replicas]
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        self._servers.keep(set(by_id))
        return [[by_id[each]] for each in self._servers.order(list(by_id), _prefix(pending_request))]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        request = pending_request.metadata.internal_request_id
        self._servers.begin(replica_id, request, _prefix(pending_request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._servers.end(internal_request_id)


def _prefix(request: PendingRequest) -> list[bytes]:
    """The last argument of Engine.answer."""
    return request.args[-1] if request.args and isinstance(request.args[-1], list) else []
