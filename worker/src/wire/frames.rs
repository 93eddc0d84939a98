// SPDX-License-Identifier: Apache-2.0

//! From the engine's outputs and events to frames of `ballast.worker.v1`.

use bytes::{Bytes, BytesMut};
use engine::kv::block_key::BlockKey;
use engine::kv::events::{FULL_SNAPSHOT, KvCacheEvent, KvEventBatch};
use engine::{Beam, EngineOutput, FinishReason, TokenOutput, TokenUsage};
use proto::v1 as public;
use proto::worker::v1::{self as wire, generate_frame, kv_event, score_frame};

/// Bytes in a frame of logits, at most.
const LOGITS_FRAME_BYTES_MAX: usize = 1 << 20;
/// Tokens in a frame of a beam, at most. With 20 alternatives, a token takes about 200 bytes.
const FRAME_TOKENS_MAX: usize = 4096;
/// Events in a frame of KV cache events, at most. An event takes about 45 bytes.
const FRAME_EVENTS_MAX: usize = 8192;

pub(crate) fn admitted(ahead: usize) -> wire::GenerateFrame {
    let admitted = wire::Admitted { requests_ahead: u32::try_from(ahead).unwrap_or(u32::MAX) };
    wire::GenerateFrame { frame: Some(generate_frame::Frame::Admitted(admitted)) }
}

/// Returns `None` for outputs that the router does not use.
pub(crate) fn generate_frame(output: EngineOutput) -> Option<wire::GenerateFrame> {
    let frame = match output {
        EngineOutput::Token(token) => generate_frame::Frame::Tokens(tokens(token)),
        EngineOutput::Finished { reason, usage, .. } => {
            generate_frame::Frame::Finished(finished(reason, usage))
        }
        EngineOutput::Admitted { .. }
        | EngineOutput::Logits { .. }
        | EngineOutput::Scored { .. }
        | EngineOutput::Embedding { .. }
        | EngineOutput::BeamProgress { .. }
        | EngineOutput::Beams { .. } => return None,
    };
    Some(wire::GenerateFrame { frame: Some(frame) })
}

pub(crate) fn beam_progress(length: usize, computed_tokens: u64) -> wire::GenerateFrame {
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    let progress = wire::BeamProgress { length, computed_tokens };
    wire::GenerateFrame { frame: Some(generate_frame::Frame::BeamProgress(progress)) }
}

/// The frames of the outputs of a beam search, one output after the other.
pub(crate) fn beam_frames(beams: Vec<Beam>, usage: TokenUsage) -> impl Iterator<Item = wire::GenerateFrame> {
    beams.into_iter().flat_map(move |beam| {
        let reason = beam.stop_token.map_or(FinishReason::Length, FinishReason::Stop);
        let chunks: Vec<wire::Tokens> = beam
            .tokens
            .chunks(FRAME_TOKENS_MAX)
            .map(|tokens| wire::Tokens {
                ids: tokens.iter().map(|token| token.token).collect(),
                logprobs: tokens
                    .iter()
                    .map(|token| token_logprob(token.logprob, token.top.clone()))
                    .collect(),
                sampler_state: Bytes::new(),
            })
            .collect();
        let tokens = chunks.into_iter().map(generate_frame::Frame::Tokens);
        let frames = tokens.chain([generate_frame::Frame::Finished(finished(reason, usage))]);
        frames.map(|frame| wire::GenerateFrame { frame: Some(frame) })
    })
}

fn tokens(token: TokenOutput) -> wire::Tokens {
    let logprob = token.logprob.map(|logprob| token_logprob(logprob, token.top));
    wire::Tokens {
        ids: vec![token.token],
        logprobs: logprob.into_iter().collect(),
        sampler_state: Bytes::copy_from_slice(token.sampler_state.as_bytes()),
    }
}

fn token_logprob(logprob: f32, top: Vec<(u32, f32)>) -> public::TokenLogprob {
    let (top_tokens, top_logprobs) = top.into_iter().unzip();
    public::TokenLogprob { logprob, top_tokens, top_logprobs }
}

fn finished(reason: FinishReason, usage: TokenUsage) -> wire::Finished {
    let mut finished = wire::Finished { cached_tokens: usage.cached_tokens as u32, ..Default::default() };
    match reason {
        FinishReason::Stop(token) => {
            finished.set_reason(public::FinishReason::Stop);
            finished.stop_token = Some(token);
        }
        FinishReason::Complete => finished.set_reason(public::FinishReason::Stop),
        _ => finished.set_reason(public::FinishReason::Length),
    }
    finished
}

/// Collects the outputs of a score request into frames of at most 1 MiB.
#[derive(Default)]
pub(crate) struct ScoreFrames {
    logits: BytesMut,
    scored: Vec<public::TokenLogprob>,
}

impl ScoreFrames {
    pub(crate) fn push(&mut self, output: EngineOutput) {
        match output {
            EngineOutput::Logits { logits, .. } => {
                self.logits.reserve(logits.len() * size_of::<f32>());
                for value in logits {
                    self.logits.extend_from_slice(&value.to_le_bytes());
                }
            }
            EngineOutput::Scored { logprob, top, .. } => self.scored.push(token_logprob(logprob, top)),
            EngineOutput::Admitted { .. }
            | EngineOutput::Token(_)
            | EngineOutput::Embedding { .. }
            | EngineOutput::BeamProgress { .. }
            | EngineOutput::Beams { .. }
            | EngineOutput::Finished { .. } => {}
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        // A scored token with 20 alternatives takes about 200 bytes.
        self.logits.len() >= LOGITS_FRAME_BYTES_MAX || self.scored.len() >= LOGITS_FRAME_BYTES_MAX / 256
    }

    /// Takes the next frame, or `None` if no outputs are collected.
    pub(crate) fn take(&mut self) -> Option<wire::ScoreFrame> {
        let frame = if !self.logits.is_empty() {
            let bytes = self.logits.len().min(LOGITS_FRAME_BYTES_MAX);
            score_frame::Frame::Logits(self.logits.split_to(bytes).freeze())
        } else if !self.scored.is_empty() {
            let logprobs = std::mem::take(&mut self.scored);
            score_frame::Frame::Scored(wire::ScoredTokens { logprobs })
        } else {
            return None;
        };
        Some(wire::ScoreFrame { frame: Some(frame) })
    }
}

/// Splits an update of `log` into frames. Only the last frame names the event to resume from,
/// because a part of a snapshot is no snapshot.
pub(crate) fn kv_event_frames(log: u64, update: KvEventBatch) -> impl Iterator<Item = wire::KvEventsFrame> {
    let KvEventBatch { events, next } = update;
    (0..events.len()).step_by(FRAME_EVENTS_MAX).map(move |at| {
        let end = events.len().min(at + FRAME_EVENTS_MAX);
        let next = if end == events.len() { next } else { FULL_SNAPSHOT };
        wire::KvEventsFrame {
            log_id: log,
            next_event: next,
            events: events[at..end].iter().map(kv_event).collect(),
        }
    })
}

fn kv_event(event: &KvCacheEvent) -> wire::KvEvent {
    let block = |name: &BlockKey| wire::KvBlock {
        hash: Bytes::copy_from_slice(name.hash.as_bytes()),
        group: u32::from(name.group),
    };
    let event = match event {
        KvCacheEvent::BlockStored(name) => kv_event::Event::Stored(block(name)),
        KvCacheEvent::BlockRemoved(name) => kv_event::Event::Removed(block(name)),
        KvCacheEvent::AllBlocksCleared => kv_event::Event::Cleared(wire::AllBlocksCleared {}),
    };
    wire::KvEvent { event: Some(event) }
}

#[cfg(test)]
mod tests {
    use engine::{BeamToken, RequestId};

    use super::*;

    fn id() -> RequestId {
        RequestId(1)
    }

    #[test]
    fn only_the_last_frame_of_an_update_can_be_resumed_from() {
        let name = |number: usize| BlockKey { hash: [number as u8; 32].into(), group: 3 };
        let stored = (0..2 * FRAME_EVENTS_MAX).map(|number| KvCacheEvent::BlockStored(name(number)));
        let events: Vec<KvCacheEvent> =
            std::iter::once(KvCacheEvent::AllBlocksCleared).chain(stored).collect();
        let frames: Vec<_> =
            kv_event_frames(7, KvEventBatch { events: events.clone(), next: 99_999 }).collect();
        let heads: Vec<_> =
            frames.iter().map(|frame| (frame.log_id, frame.next_event, frame.events.len())).collect();
        assert_eq!(heads, [(7, 0, FRAME_EVENTS_MAX), (7, 0, FRAME_EVENTS_MAX), (7, 99_999, 1)]);
        let sent = frames.iter().flat_map(|frame| &frame.events);
        assert!(sent.eq(&events.iter().map(kv_event).collect::<Vec<_>>()));
        let Some(kv_event::Event::Stored(block)) = &frames[0].events[2].event else { panic!("{frames:?}") };
        assert_eq!((&block.hash[..], block.group), (&[1; 32][..], 3));
    }

    #[test]
    fn each_beam_is_sent_in_bounded_frames_and_ends_with_its_own_reason() {
        let beam = |tokens: u32, stop_token| Beam {
            tokens: (0..tokens).map(|token| BeamToken { token, logprob: -0.5, top: vec![] }).collect(),
            stop_token,
            score: -1.0,
        };
        let long = FRAME_TOKENS_MAX as u32 + 1;
        let usage = TokenUsage { cached_tokens: 9, ..TokenUsage::default() };
        let mut tokens = vec![Vec::new()];
        let mut ends = Vec::new();
        for frame in beam_frames(vec![beam(long, Some(3)), beam(0, Some(4)), beam(2, None)], usage) {
            match frame.frame.unwrap() {
                generate_frame::Frame::Tokens(chunk) => {
                    assert!(chunk.ids.len() <= FRAME_TOKENS_MAX && chunk.ids.len() == chunk.logprobs.len());
                    tokens.last_mut().unwrap().extend(chunk.ids);
                }
                generate_frame::Frame::Finished(end) => {
                    ends.push((end.reason(), end.stop_token, end.cached_tokens));
                    tokens.push(Vec::new());
                }
                generate_frame::Frame::Admitted(_) | generate_frame::Frame::BeamProgress(_) => {
                    panic!("a beam is neither admitted nor under way")
                }
            }
        }
        assert_eq!(tokens, [(0..long).collect(), vec![], vec![0, 1], vec![]]);
        let (stop, length) = (public::FinishReason::Stop, public::FinishReason::Length);
        assert_eq!(ends, [(stop, Some(3), 9), (stop, Some(4), 9), (length, None, 9)]);
    }

    #[test]
    fn logits_are_sent_in_order_in_frames_of_at_most_1_mib() {
        let mut frames = ScoreFrames::default();
        let rows = [vec![1.5f32; 200_000], vec![-2.0; 200_000], vec![3.0; 5]];
        let mut bytes = Vec::new();
        for (position, row) in rows.iter().enumerate() {
            frames.push(EngineOutput::Logits { id: id(), position, logits: row.clone() });
        }
        while let Some(frame) = frames.take() {
            let Some(score_frame::Frame::Logits(chunk)) = frame.frame else { panic!("logits") };
            assert!(chunk.len() <= LOGITS_FRAME_BYTES_MAX);
            bytes.extend_from_slice(&chunk);
        }
        let values: Vec<f32> =
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert_eq!(values, rows.concat());
    }
}
