// SPDX-License-Identifier: Apache-2.0

//! What the limits on leases refuse.

use super::*;

#[test]
fn lease_beyond_the_limit_of_clients_is_refused_as_busy() {
    let mut state = state_with(1 << 50, 1 << 20);
    load_fully(&mut state, 1, "a", 1, 10 * MIB);
    for connection in 1..=MAX_CLIENTS as u64 {
        attach_fully(&mut state, connection, "a");
    }
    let one_more = state.handle(attach(1 << 20, "a"), at(5));
    assert!(
        matches!(refusals(&one_more)[..], [AttachRefusal::Busy { clients: MAX_CLIENTS }]),
        "{one_more:?}"
    );
    state.handle(WeightServerEvent::ConnectionEnded { connection: ConnectionId(1) }, at(6));
    check_integrity(&state);
}

#[test]
fn lease_whose_workspace_alone_does_not_fit_is_told_what_is_missing() {
    let mut state = state();
    load_fully(&mut state, 1, "a", 1, 400 * MIB);
    let params = AttachParams { workspace_bytes: 600 * MIB, ..ask("a") };
    let (connection, peer) = (ConnectionId(10), peer(10));
    let actions = state.handle(WeightServerEvent::AttachRequested { connection, peer, params }, at(4));
    let [AttachRefusal::Reservation(ReservationError::InsufficientMemory { free, .. })] =
        refusals(&actions)[..]
    else {
        panic!("{actions:?}")
    };
    assert_eq!(*free, 600 * MIB);
}
