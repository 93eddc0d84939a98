// SPDX-License-Identifier: Apache-2.0

//! A worker with drafting generates the tokens of a worker without drafting.

use proto::worker::v1 as wire;
use service::exit::HasExit;
use worker::{DraftSource, WorkerRunError};

use crate::fake_weight_server::MODEL;
use crate::harness::{Generated, WorkerFixture, config, fleet, fleet_with, spawn};

/// Greedy and sampled requests for a text that repeats itself, with log probabilities.
fn requests(worker: &WorkerFixture) -> Vec<wire::GenerateRequest> {
    let prompt: Vec<u32> = (0..48).map(|i| 300 + i % 12).collect();
    (0..6)
        .map(|seed| {
            let mut request = worker.greedy(&prompt[..24 + 4 * seed as usize], 40);
            request.top_logprobs = Some(2);
            let sampling = request.sampling.as_mut().unwrap();
            sampling.seed = Some(seed);
            if seed % 2 == 1 {
                (sampling.temperature, sampling.frequency_penalty) = (Some(0.7), Some(0.4));
            }
            request
        })
        .collect()
}

async fn answers(worker: &mut WorkerFixture) -> Vec<Generated> {
    let mut answers = Vec::new();
    for request in requests(worker) {
        answers.push(worker.generate(request).await.unwrap());
    }
    answers
}

#[tokio::test(flavor = "multi_thread")]
async fn drafts_change_no_token_and_are_counted() {
    let (_directory, _weight_server, mut plain) = fleet().await;
    let expected = answers(&mut plain).await;
    assert!(plain.stats().await.draft_tokens_per_position.is_empty());
    for draft in [DraftSource::Lookup, DraftSource::Model(MODEL.to_owned())] {
        let leases = 1 + usize::from(draft != DraftSource::Lookup);
        let (_directory, weight_server, mut drafting) =
            fleet_with(|config| config.draft = draft.clone()).await;
        let attached = weight_server.attached.load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!(attached, leases, "{draft:?}");
        assert_eq!(drafting.fingerprint, plain.fingerprint, "a stream can be resumed on either worker");
        for (got, expected) in answers(&mut drafting).await.iter().zip(&expected) {
            assert_eq!((&got.tokens, &got.logprobs), (&expected.tokens, &expected.logprobs), "{draft:?}");
        }
        let stats = drafting.stats().await;
        let (drafted, accepted): (u64, u64) =
            (stats.draft_tokens_per_position.iter().sum(), stats.accepted_tokens_per_position.iter().sum());
        assert_eq!((stats.draft_tokens_per_position.len(), stats.draft_failures), (8, 0));
        assert!(accepted >= 5 && accepted <= drafted, "{draft:?}: {accepted} of {drafted}");
        assert!(stats.steps < plain.stats().await.steps, "{draft:?}");
        drafting.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_depth_above_the_limit_is_a_configuration_error() {
    let (directory, _weight_server, _worker) = fleet().await;
    let mut config = config(directory.path(), 1);
    (config.draft, config.draft_depth) = (DraftSource::Lookup, 17);
    let (_shutdown, thread) = spawn(config);
    let error = tokio::task::spawn_blocking(move || thread.join().unwrap()).await.unwrap().unwrap_err();
    assert!(matches!(error, WorkerRunError::Attach(_)) && error.exit() == service::Exit::Usage, "{error:?}");
}
