//! What drafts are worth: the same prompts through a fleet that drafts and through one that does not, in turns.

use std::time::Instant;

use futures::{StreamExt, TryStreamExt, stream};
use proto::v1::inference_client::InferenceClient;
use proto::v1::{self as wire, generate_frame, generate_request};
use serde::Serialize;
use tonic::Status;
use tonic::transport::Channel;

use crate::fleet::{FleetError, MeasuredFleet};
use crate::lives::{LifeError, worker_stats};
use crate::report::median;

/// What is asked of both fleets.
#[derive(Clone, Debug)]
pub struct DraftLoad {
    pub prompts: Vec<String>,
    /// Output of each prompt.
    pub tokens: u32,
    pub temperature: f32,
    /// Streams at any time.
    pub at_once: usize,
    pub rounds: u32,
}

#[derive(Clone, Debug, Serialize)]
pub struct DraftReport {
    /// Output tokens per second of each round, prompts included.
    pub plain_tokens_per_s: Vec<f64>,
    pub drafting_tokens_per_s: Vec<f64>,
    /// Drafting to plain, the median over the rounds.
    pub speed_up: f64,
    /// Drafted tokens that were computed, and those that were put out, by place in their draft.
    pub drafted: Vec<u64>,
    pub accepted: Vec<u64>,
}

#[derive(Debug, thiserror::Error)]
pub enum DraftError {
    #[error(transparent)]
    Fleet(#[from] FleetError),
    #[error(transparent)]
    Life(#[from] LifeError),
    #[error("prompt {prompt} failed")]
    Stream { prompt: usize, source: Box<Status> },
    #[error("prompt {prompt} is continued differently with drafts: {drafting:?} instead of {plain:?}")]
    Different { prompt: usize, plain: Vec<u32>, drafting: Vec<u32> },
}

/// Runs the load through both, once unmeasured and then `rounds` times in turns; the outputs must be equal.
pub async fn drafts_against_plain(
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
        // The first steps fault in pages, and the first round computes the prompts that later ones find.
        if round > 0 {
            rates.0.push(without.tokens_per_s);
            rates.1.push(with.tokens_per_s);
        }
    }
    let (mut drafted, mut accepted) = (Vec::new(), Vec::new());
    for stats in worker_stats(drafting).await? {
        add(&mut drafted, &stats.draft_tokens_per_position);
        add(&mut accepted, &stats.accepted_tokens_per_position);
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

struct Run {
    outputs: Vec<Vec<u32>>,
    tokens_per_s: f64,
}

async fn run(client: &InferenceClient<Channel>, load: &DraftLoad) -> Result<Run, DraftError> {
    let start = Instant::now();
    let streams = load.prompts.iter().enumerate().map(|(prompt, text)| async move {
        let output = output(client.clone(), text.clone(), prompt as u64, load).await;
        output.map_err(|source| DraftError::Stream { prompt, source: Box::new(source) })
    });
    let outputs: Vec<Vec<u32>> = stream::iter(streams).buffered(load.at_once.max(1)).try_collect().await?;
    let count: usize = outputs.iter().map(Vec::len).sum();
    Ok(Run { outputs, tokens_per_s: count as f64 / start.elapsed().as_secs_f64() })
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
        if let Some(generate_frame::Frame::Delta(piece)) = frame.frame {
            tokens.extend(piece.tokens);
        }
    }
    Ok(tokens)
}

fn add(sums: &mut Vec<u64>, more: &[u64]) {
    sums.resize(sums.len().max(more.len()), 0);
    sums.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_several_workers_add_up() {
        let mut sums = vec![];
        add(&mut sums, &[3, 2]);
        add(&mut sums, &[1, 1, 1]);
        add(&mut sums, &[]);
        assert_eq!(sums, [4, 3, 1]);
    }
}
