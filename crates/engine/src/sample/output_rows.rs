// SPDX-License-Identifier: Apache-2.0

//! What a step copies from the device: a token where the device can choose it, else the row of
//! logits, or the hidden state of a row that is pooled.
//!
//! Both give the same result: a token from a shortlist is the token that the sampler draws from the
//! row.

use crate::sample::draw::SampleContext;
use crate::sample::history::History;
use crate::sample::logprobs::TokenLogProbs;
use crate::sample::sampler::Sampler;
use ops::{Backend, DrawParams, NO_ARGMAX, OpError, Shortlist};
use std::ops::Range;

/// A token that the device may choose.
#[derive(Clone, Copy)]
pub(crate) struct DeviceDraw<'a> {
    pub(crate) context: SampleContext<'a>,
    pub(crate) history: &'a History,
    /// Alternatives whose log-probabilities are wanted, with that of the token.
    pub(crate) logprobs: Option<u8>,
}

impl DeviceDraw<'_> {
    /// Whether the token is the one of the highest logit, and nothing else is wanted.
    fn is_argmax(&self) -> bool {
        let is_greedy = self.context.params.temperature == 0.0;
        is_greedy && self.logprobs.is_none() && self.context.uses_raw_logits(self.history)
    }

    /// How the device must draw the token. None if the host draws it. Whether it is None does not
    /// depend on the position: it is asked before the position is known.
    pub(crate) fn device_params(&self, vocab_size: usize) -> Option<DrawParams> {
        if self.is_argmax() {
            return Some(DrawParams::default());
        }
        // XTC acts at random positions.
        if self.context.params.xtc_probability > 0.0 {
            return None;
        }
        let params = self.context.shortlist_params(vocab_size, self.history)?;
        (self.logprobs.is_none() && params.uniform.is_some()).then_some(params)
    }

    /// How the device must compute the shortlist. None if a shortlist does not suffice.
    fn shortlist_params(&self, vocab_size: usize) -> Option<DrawParams> {
        let params = self.context.shortlist_params(vocab_size, self.history)?;
        // The sum of weights of another temperature says nothing about log-probabilities.
        (self.logprobs.is_none() || params.temperature == 1.0).then_some(params)
    }

    /// The token and what is reported about it, if the list determines both.
    fn take(
        &self,
        sampler: &mut Sampler,
        list: &Shortlist,
        vocab_size: usize,
    ) -> Option<(u32, Option<TokenLogProbs>)> {
        self.shortlist_params(vocab_size)?;
        let token = sampler.sample_shortlist(list, vocab_size, &self.context, self.history)?;
        match self.logprobs {
            None => Some((token, None)),
            Some(top) => Some((token, Some(TokenLogProbs::of_list(list, token, top)?))),
        }
    }
}

/// Tokens and logits of one step, in the order of its outputs. Buffers are kept between steps until
/// `release_memory`.
#[derive(Debug, Default)]
pub(crate) struct OutputRows {
    /// By output: the token, or [`NO_ARGMAX`] if the row is in `logits`.
    drawn: Vec<u32>,
    /// By output: the log-probabilities of a token in `drawn`, if they are wanted.
    logprobs: Vec<Option<TokenLogProbs>>,
    /// Reaches to the last row that the host needs.
    logits: Vec<f32>,
    draw_params: Vec<DrawParams>,
    lists: Vec<Shortlist>,
    /// Rows of other kinds than logits, and the range of each in `states`, by output.
    states: Vec<f32>,
    state_ranges: Vec<(usize, Range<usize>)>,
}

impl OutputRows {
    /// Starts a step with this number of outputs.
    pub(crate) fn start(&mut self, outputs: usize) {
        self.drawn.clear();
        self.drawn.resize(outputs, NO_ARGMAX);
        self.logprobs.clear();
        self.logprobs.resize(outputs, None);
        self.states.clear();
        self.state_ranges.clear();
    }

    /// Releases the buffers. Call it between steps.
    pub(crate) fn release_memory(&mut self) {
        *self = Self::default();
    }

    /// Takes a range of outputs. `draws` has the result of
    /// [`ActiveRequest::draw`](crate::request::state::ActiveRequest::draw) for each.
    pub(crate) fn take<'a, B: Backend>(
        &mut self,
        backend: &mut B,
        sampler: &mut Sampler,
        vocab_size: usize,
        run: Range<usize>,
        logits: &B::Tensor,
        draws: impl Iterator<Item = Option<DeviceDraw<'a>>> + Clone,
    ) -> Result<(), OpError> {
        let drawn = &mut self.drawn[run.clone()];
        let params_of =
            |draw: Option<DeviceDraw<'a>>| draw.and_then(|draw| draw.shortlist_params(vocab_size));
        if draws.clone().all(|draw| draw.is_some_and(|draw| draw.is_argmax())) {
            backend.argmax(logits, run.len(), vocab_size, drawn)?;
        } else if B::PREFERS_SHORTLISTS && draws.clone().any(|draw| params_of(draw).is_some()) {
            self.draw_params.clear();
            self.draw_params.extend(draws.clone().map(|draw| params_of(draw).unwrap_or_default()));
            if self.lists.len() < run.len() {
                self.lists.resize(run.len(), Shortlist::default());
            }
            let lists = &mut self.lists[..run.len()];
            backend.shortlists(logits, vocab_size, &self.draw_params, lists)?;
            let logprobs = &mut self.logprobs[run.clone()];
            for (((drawn, logprobs), list), draw) in drawn.iter_mut().zip(logprobs).zip(lists).zip(draws) {
                let taken = draw.and_then(|draw| draw.take(sampler, list, vocab_size));
                (*drawn, *logprobs) = taken.unwrap_or((NO_ARGMAX, None));
            }
        }
        self.read(backend, vocab_size, run, logits)
    }

    /// Whether the device can draw the tokens of all outputs of the step. Then
    /// [`Self::start_draws`] lets it do so.
    pub(crate) fn can_start_draws<'a>(
        &mut self,
        vocab_size: usize,
        mut draws: impl Iterator<Item = Option<DeviceDraw<'a>>>,
    ) -> bool {
        self.draw_params.clear();
        draws.all(|draw| {
            let params = draw.and_then(|draw| draw.device_params(vocab_size));
            self.draw_params.extend(params);
            params.is_some()
        })
    }

    /// Lets the device draw the tokens of a range of outputs.
    pub(crate) fn start_draws<B: Backend>(
        &self,
        backend: &mut B,
        vocab_size: usize,
        run: Range<usize>,
        logits: &B::Tensor,
    ) -> Result<(), OpError> {
        backend.start_draws(logits, vocab_size, &self.draw_params, run)
    }

    /// Takes a range of outputs that are not logits, in rows of `width` values.
    pub(crate) fn take_states<B: Backend>(
        &mut self,
        backend: &mut B,
        width: usize,
        run: Range<usize>,
        rows: &B::Tensor,
    ) -> Result<(), OpError> {
        let first = self.states.len();
        self.states.resize(first + run.len() * width, 0.0);
        backend.read_rows(rows, 0..run.len(), &mut self.states[first..])?;
        let range_of = |row: usize| first + row * width..first + (row + 1) * width;
        self.state_ranges.extend(run.enumerate().map(|(row, output)| (output, range_of(row))));
        Ok(())
    }

    /// Reads the rows without a token, adjacent rows in one copy.
    fn read<B: Backend>(
        &mut self,
        backend: &mut B,
        vocab_size: usize,
        run: Range<usize>,
        logits: &B::Tensor,
    ) -> Result<(), OpError> {
        let mut at = run.start;
        for same in self.drawn[run.clone()].chunk_by(|a, b| (*a == NO_ARGMAX) == (*b == NO_ARGMAX)) {
            let rows = at..at + same.len();
            at = rows.end;
            if same[0] == NO_ARGMAX {
                let values = rows.start * vocab_size..rows.end * vocab_size;
                if self.logits.len() < values.end {
                    self.logits.resize(values.end, 0.0);
                }
                let here = rows.start - run.start..rows.end - run.start;
                backend.read_rows(logits, here, &mut self.logits[values])?;
            }
        }
        Ok(())
    }

    pub(crate) fn row(&self, output: usize, vocab_size: usize) -> RowOutput<'_> {
        if let Ok(found) = self.state_ranges.binary_search_by_key(&output, |(output, _)| *output) {
            return RowOutput::State(&self.states[self.state_ranges[found].1.clone()]);
        }
        match self.drawn[output] {
            NO_ARGMAX => RowOutput::Logits(&self.logits[output * vocab_size..][..vocab_size]),
            token => RowOutput::Token(token, self.logprobs[output].as_ref()),
        }
    }
}

/// The model's result for a row.
#[derive(Clone, Copy)]
pub(crate) enum RowOutput<'a> {
    Logits(&'a [f32]),
    /// The token, chosen as `ActiveRequest::draw` says, and its log-probabilities if they are
    /// wanted.
    Token(u32, Option<&'a TokenLogProbs>),
    /// The device drew the token and found no finite maximum.
    NoToken,
    /// The hidden state, or the classifier's labels.
    State(&'a [f32]),
}
