// SPDX-License-Identifier: Apache-2.0

//! Measures speculative decoding: the same prompts on a fleet with draft tokens and on one without,
//! in turns.

use std::time::Instant;

use futures::{StreamExt, TryStreamExt, stream};
use proto::v1::inference_client::InferenceClient;
use proto::v1::{self as wire, generate_frame, generate_request};
use serde::Serialize;
use tonic::Status;
use tonic::transport::Channel;

use crate::fleet::{FleetError, MeasuredFleet};
use crate::report::median;
use crate::streams::count_received;
use crate::worker_startup::{WorkerStartupError, worker_stats};

/// The load for both fleets.
#[derive(Clone, Debug)]
pub struct DraftLoad {
    pub prompts: Vec<String>,
    /// Output tokens of each prompt.
    pub tokens: u32,
    pub temperature: f32,
    /// Maximum number of concurrent streams.
    pub at_once: usize,
    pub rounds: u32,
}

#[derive(Clone, Debug, Serialize)]
pub struct DraftReport {
    /// Output tokens per second of each round, including the time of prefill.
    pub plain_tokens_per_s: Vec<f64>,
    pub drafting_tokens_per_s: Vec<f64>,
    /// Ratio of speed with draft tokens to speed without, the median over the rounds.
    pub speed_up: f64,
    /// Verified draft tokens and accepted draft tokens, by position in the draft.
    pub drafted: Vec<u64>,
    pub accepted: Vec<u64>,
}

#[derive(Debug, thiserror::Error)]
pub enum DraftError {
    #[error(transparent)]
    Fleet(#[from] FleetError),
    #[error(transparent)]
    Life(#[from] WorkerStartupError),
    #[error("prompt {prompt} failed")]
    Stream { prompt: usize, source: Box<Status> },
    #[error("prompt {prompt} has another output with draft tokens: {drafting:?} instead of {plain:?}")]
    Different { prompt: usize, plain: Vec<u32>, drafting: Vec<u32> },
}

/// Runs the load on both fleets, once as warm-up and then `rounds` times in turns. Outputs must be
/// equal.
pub async fn compare_drafting(
    plain: &MeasuredFleet,
    drafting: &MeasuredFleet,
    load: &DraftLoad,
) -> Result<DraftReport, DraftError> {
    let clients = (plain.client().await?, drafting.client().await?);
    let mut rates = (Vec::new(), Vec::new());
    for round in 0..=load.rounds {
        let without = run(&clients.0, load).await?;
        let with = run(&clients.1, load).await?;
        let pairs = without.outputs.iter().zip(&with.outputs).enumerate();
        for (prompt, (plain, drafting)) in pairs {
            if plain != drafting {
                let (plain, drafting) = (plain.clone(), drafting.clone());
                return Err(DraftError::Different { prompt, plain, drafting });
            }
        }
        // The warm-up round faults in pages and fills the prefix cache.
        if round > 0 {
            rates.0.push(without.tokens_per_s);
            rates.1.push(with.tokens_per_s);
        }
    }
    let (mut drafted, mut accepted) = (Vec::new(), Vec::new());
    for stats in worker_stats(drafting).await? {
        add_per_position(&mut drafted, &stats.draft_tokens_per_position);
        add_per_position(&mut accepted, &stats.accepted_tokens_per_position);
    }
    let speed_up = median(rates.1.iter().zip(&rates.0).map(|(with, without)| with / without).collect());
    Ok(DraftReport {
        plain_tokens_per_s: rates.0,
        drafting_tokens_per_s: rates.1,
        speed_up,
        drafted,
        accepted,
    })
}

struct DraftRun {
    outputs: Vec<Vec<u32>>,
    tokens_per_s: f64,
}

async fn run(client: &InferenceClient<Channel>, load: &DraftLoad) -> Result<DraftRun, DraftError> {
    let start = Instant::now();
    let streams = load.prompts.iter().enumerate().map(|(prompt, text)| async move {
        let output = output(client.clone(), text.clone(), prompt as u64, load).await;
        output.map_err(|source| DraftError::Stream { prompt, source: Box::new(source) })
    });
    let outputs: Vec<Vec<u32>> = stream::iter(streams).buffered(load.at_once.max(1)).try_collect().await?;
    let count: usize = outputs.iter().map(Vec::len).sum();
    Ok(DraftRun { outputs, tokens_per_s: count as f64 / start.elapsed().as_secs_f64() })
}

async fn output(
    mut client: InferenceClient<Channel>,
    text: String,
    seed: u64,
    load: &DraftLoad,
) -> Result<Vec<u32>, Status> {
    let temperature = Some(load.temperature);
    let request = wire::GenerateRequest {
        prompt: Some(generate_request::Prompt::Text(text)),
        max_tokens: load.tokens,
        sampling: Some(wire::Sampling { temperature, seed: Some(seed), ..Default::default() }),
        ..Default::default()
    };
    let mut frames = client.generate(request).await?.into_inner();
    let mut tokens = Vec::with_capacity(load.tokens as usize);
    while let Some(frame) = frames.message().await? {
        if let Some(generate_frame::Frame::Delta(delta)) = frame.frame {
            count_received(delta.tokens.len());
            tokens.extend(delta.tokens);
        }
    }
    Ok(tokens)
}

fn add_per_position(sums: &mut Vec<u64>, more: &[u64]) {
    sums.resize(sums.len().max(more.len()), 0);
    sums.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_of_several_workers_add_up() {
        let mut sums = vec![];
        add_per_position(&mut sums, &[3, 2]);
        add_per_position(&mut sums, &[1, 1, 1]);
        add_per_position(&mut sums, &[]);
        assert_eq!(sums, [4, 3, 1]);
    }
}
