// SPDX-License-Identifier: Apache-2.0

use proptest::prelude::*;

use super::*;

fn copies<const N: usize>(devices: [&'static str; N]) -> ModelCopies {
    ModelCopies::loading(devices.into_iter())
}

fn digest(byte: u8) -> Bytes {
    Bytes::copy_from_slice(&[byte])
}

fn failed() -> ModelState {
    ModelState::Failed(ModelFailure { exit: Exit::OutOfResources, text: "no memory".to_owned() })
}

fn loading() -> ModelState {
    ModelState::Loading { done_bytes: 1, total_bytes: 2 }
}

#[test]
fn one_copy_that_fails_first_is_given_up_and_one_that_served_is_not() {
    let mut one = copies(["a"]);
    assert!(!one.repeats_load("a"));
    assert_eq!(one.set_state("a", failed()), Some(CopyAction::GiveUp));
    assert_eq!(one.state(), failed());
    let mut served = copies(["a"]);
    assert_eq!(served.set_loaded("a", digest(1)), None);
    assert!(served.repeats_load("a"));
    assert_eq!(served.set_state("a", failed()), None);
    assert_eq!(served.digest(), Some(digest(1)), "what the weight-server has to hold");
}

#[test]
fn a_copy_that_fails_leaves_the_others_alone_and_gets_its_workers_when_it_comes() {
    let mut two = copies(["a", "b"]);
    two.set_loaded("a", digest(1));
    assert!(matches!(two.state(), ModelState::Loading { .. }), "the second copy is not settled");
    assert_eq!(two.set_state("b", failed()), Some(CopyAction::RemoveWorkers));
    assert_eq!(two.state(), ModelState::Ready);
    assert!(two.repeats_load("b"));
    assert_eq!(two.set_state("b", loading()), None);
    assert_eq!(two.state(), ModelState::Ready, "a retry does not make the model wait");
    assert_eq!(two.set_loaded("b", digest(1)), Some(CopyAction::StartWorkers));
    assert_eq!(two.set_loaded("b", digest(1)), None, "only once");
}

#[test]
fn a_model_fails_only_with_its_last_copy() {
    let mut two = copies(["a", "b"]);
    assert_eq!(two.set_state("a", failed()), Some(CopyAction::RemoveWorkers));
    assert!(matches!(two.state(), ModelState::Loading { .. }));
    assert_eq!(two.set_state("b", failed()), Some(CopyAction::GiveUp));
    assert_eq!(two.state(), failed());
    assert!(two.has_given_up());
}

#[test]
fn another_content_beside_a_confirmed_copy_is_rejected() {
    let mut two = copies(["a", "b"]);
    two.set_loaded("a", digest(1));
    assert_eq!(two.set_loaded("b", digest(2)), Some(CopyAction::Reject));
    assert_eq!((two.digest(), two.digest_on("b")), (Some(digest(1)), None));
    let ModelState::Failed(failure) = &two.status(str::to_owned)[1].state else { panic!("{two:?}") };
    assert!(failure.text.contains("other content than the copy on a"), "{}", failure.text);
    assert!(two.lacks_workers("b"), "it was never ready");
    // A weight-server that has lost everything loads the present file for all.
    two.forget_confirmations();
    assert_eq!(two.set_loaded("a", digest(2)), None);
    assert_ne!(two.set_loaded("b", digest(2)), Some(CopyAction::Reject));
}

#[test]
fn after_a_takeover_the_workers_of_a_copy_without_any_leave_if_it_cannot_be_loaded() {
    let mut two = copies(["a", "b"]);
    two.set_served(|device| device == "a");
    assert_eq!(two.set_state("a", failed()), None);
    assert_eq!(two.set_state("b", failed()), Some(CopyAction::RemoveWorkers));
    assert!(!two.has_given_up());
    // All workers died with the supervisor: no copy is given up.
    let mut two = copies(["a", "b"]);
    two.set_served(|_| false);
    assert_eq!((two.set_state("a", failed()), two.set_state("b", failed())), (None, None));
}

#[test]
fn one_more_worker_goes_where_the_fewest_are_and_a_copy_is() {
    let mut three = copies(["a", "b", "c"]);
    let workers = |device: &str| if device == "a" { 2 } else { 1 };
    assert_eq!(three.device_for_worker(workers).as_deref(), Some("b"));
    three.set_state("b", failed());
    assert_eq!(three.device_for_worker(workers).as_deref(), Some("c"));
}

proptest! {
    /// Whatever happens in whatever order, confirmed copies have one content, and a model with a
    /// ready copy has not failed.
    #[test]
    fn a_model_has_one_content_and_serves_while_a_copy_is_ready(
        events in proptest::collection::vec((0..3usize, 0..4u8), 0..60)
    ) {
        let names = ["a", "b", "c"];
        let mut all = copies(names);
        for (device, kind) in events {
            match kind {
                0 => drop(all.set_state(names[device], failed())),
                1 => drop(all.set_state(names[device], loading())),
                2 => drop(all.set_loaded(names[device], digest(1))),
                _ => drop(all.set_loaded(names[device], digest(2))),
            }
            let confirmed: Vec<&ModelCopy> = all.copies.iter().filter(|copy| copy.is_confirmed).collect();
            prop_assert!(confirmed.windows(2).all(|pair| pair[0].digest == pair[1].digest));
            let is_ready = all.copies.iter().any(|copy| copy.state == ModelState::Ready);
            prop_assert!(!(is_ready && matches!(all.state(), ModelState::Failed(_))));
        }
    }
}
