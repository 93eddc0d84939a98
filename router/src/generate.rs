//! A request from either surface, checked, admitted as a whole, and then streamed.
//!
//! Nothing is sent to the client before every choice of the request has been admitted by a worker: overload and bad
//! requests are refusals with a status, never errors in the middle of a response.

use std::sync::Arc;
use std::time::Duration;

use futures::future::try_join_all;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::admission::{Class, Entry, NeverFits, Room, Tenant};
use crate::choice::{Choice, Event};
use crate::dispatch::{Refusal, open};
use crate::fleet::{Fleet, Place};
use crate::gate::Gate;
use crate::grammar_check::GrammarChecks;
use crate::metrics;
use crate::model::Model;
use crate::params::{CheckedParams, RequestParamError, RequestParams};
use crate::resume::Progress;
use crate::tenant::Tenants;
use crate::text_stream::TextStream;
use crate::wire::Call;

/// Pieces that wait for a slow client, for each choice; then the worker has to wait too.
const PIECES_BUFFERED_MAX: usize = 128;
/// Prompts of one request times its `n`.
pub(crate) const CHOICES_MAX: usize = 128;

/// A checked request.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) model: Arc<Model>,
    prompts: Vec<(Arc<[u32]>, Arc<CheckedParams>)>,
    at_text_start: bool,
    origin: Origin,
}

/// Whose request it is, and since when.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    pub(crate) request_id: Arc<str>,
    pub(crate) arrived: Instant,
    pub(crate) tenant: Tenant,
}

/// Token ids and what they are called on the surface they came from.
#[derive(Debug)]
pub(crate) struct Prompts {
    pub(crate) param: &'static str,
    pub(crate) tokens: Vec<Vec<u32>>,
    /// The output is a text of its own rather than the continuation of the prompt.
    pub(crate) at_text_start: bool,
}

impl Job {
    pub(crate) fn new(
        model: Arc<Model>,
        prompts: Prompts,
        mut params: RequestParams,
        origin: Origin,
    ) -> Result<Self, RequestParamError> {
        let Prompts { param, tokens, at_text_start } = prompts;
        let mut checked = Vec::with_capacity(tokens.len());
        for prompt in tokens {
            let checked_params = params.clone().check(model.limits(), param, prompt.len())?;
            // All prompts of a request share one seed, so each gives the output that it gives alone.
            params.seed = Some(checked_params.sampling.seed);
            checked.push((prompt.into(), Arc::new(checked_params)));
        }
        let count = checked.len() * checked.first().map_or(0, |(_, params)| params.best_of as usize);
        if count > CHOICES_MAX {
            return Err(RequestParamError::TooManyEntries { param: "n", count, max: CHOICES_MAX });
        }
        if count == 0 {
            return Err(RequestParamError::EmptyPrompt { param });
        }
        Ok(Self { model, prompts: checked, at_text_start, origin })
    }

    pub(crate) fn prompts(&self) -> impl Iterator<Item = &[u32]> {
        self.prompts.iter().map(|(prompt, _)| &**prompt)
    }

    /// Of every prompt.
    pub(crate) fn params(&self) -> &CheckedParams {
        &self.prompts[0].1
    }

    pub(crate) fn class(&self) -> Class {
        Class::of_priority(self.params().priority)
    }

    /// In the response: choice `c` of prompt `p` has index `p * n + c`.
    pub(crate) fn choices(&self) -> usize {
        self.prompts.len() * self.params().best_of as usize
    }
}

/// What generating needs of the process; cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Generator {
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) gate: Arc<Gate>,
    pub(crate) grammars: Arc<GrammarChecks>,
    pub(crate) tenants: Tenants,
    /// The longest that a request may take.
    pub(crate) request_timeout: Duration,
}

impl Generator {
    /// Every choice is admitted, or none is. The events end after the last choice's `Ended`; dropping the receiver
    /// cancels the rest.
    pub(crate) async fn start(&self, job: &Job) -> Result<mpsc::Receiver<Event>, Refusal> {
        let started = self.admit(job).await;
        if let Err(refusal) = &started {
            metrics::refused(job.model.name(), job.class(), refusal.reason());
        }
        started
    }

    async fn admit(&self, job: &Job) -> Result<mpsc::Receiver<Event>, Refusal> {
        let choices = job.choices();
        let timeout =
            job.params().deadline.map_or(self.request_timeout, |asked| asked.min(self.request_timeout));
        let deadline = job.origin.arrived + timeout;
        let entry = Entry {
            model: job.model.key().clone(),
            tenant: job.origin.tenant.clone(),
            priority: job.params().priority,
            places: choices as u32,
            deadline: self.gate.time(deadline),
        };
        self.check_room(job)?;
        if let Some(grammar) = &job.params().grammar {
            let Job { model, origin, .. } = job;
            self.grammars.check(model.key(), grammar, &origin.tenant, deadline).await?;
        }
        let mut places = self.gate.enter(job.model.name(), entry).await?;
        let deadline = Some(deadline);
        let calls: Vec<Call> = job.calls(self.tenants.number(&job.origin.tenant));
        let attempts = calls.iter().zip(self.place(&calls)).map(|(call, place)| async move {
            let progress = Progress::new(call.params.max_tokens);
            let attempt = open(&self.fleet, call, &progress, deadline, place).await?;
            Ok::<_, Refusal>((attempt, progress))
        });
        let attempts = try_join_all(attempts).await?;

        let (events, receiver) = mpsc::channel(choices * (PIECES_BUFFERED_MAX + 1));
        for ((index, call), (attempt, progress)) in (0..).zip(calls).zip(attempts) {
            let text = TextStream::new(&job.model, &call.params.stop, job.at_text_start)
                .map_err(|error| Refusal::Invalid { detail: error.to_string() })?;
            // There is room for one last word of each choice, and one place.
            let (Ok(last_word), Some(place)) = (events.clone().try_reserve_owned(), places.split()) else {
                return Err(Refusal::Failed { detail: "no room for the answer".to_owned() });
            };
            let choice = Choice {
                index,
                model: job.model.clone(),
                fleet: self.fleet.clone(),
                call,
                arrived: job.origin.arrived,
                deadline,
                events: events.clone(),
                _place: place,
            };
            tokio::spawn(choice.run(attempt, progress, text, last_word));
        }
        for prompt in job.prompts() {
            metrics::prompt(job.model.name(), prompt.len());
        }
        Ok(receiver)
    }

    /// Choices of a prompt each beside the one before, where the prompt is computed anyway.
    fn place(&self, calls: &[Call]) -> Vec<Option<Place>> {
        let mut beside = None;
        let places = calls.iter().map(|call| {
            let place = self.fleet.place(&call.model, &[], beside.filter(|_| call.choice > 0));
            beside = place.as_ref().map(|place| place.peer.worker);
            place
        });
        places.collect()
    }

    /// What no worker could ever hold does not wait.
    fn check_room(&self, job: &Job) -> Result<(), NeverFits> {
        let room = self.fleet.room(job.model.key());
        if room == Room::default() {
            // Nobody is there to say; the gate does.
            return Ok(());
        }
        let output = job.params().is_max_tokens_given.then_some(job.params().max_tokens);
        let longest = job.prompts().map(<[u32]>::len).max().unwrap_or(0);
        let streams_max = room.at_once(job.class(), &job.origin.tenant).min(self.gate.streams_max());
        room.check(longest as u64, output, job.choices() as u32, streams_max)
    }
}

impl Job {
    fn calls(&self, tenant: u64) -> Vec<Call> {
        let mut calls = Vec::with_capacity(self.choices());
        let dry_breakers: Arc<[Vec<u32>]> = match &self.params().sampling.dry {
            Some(dry) => self.model.text.dry_breakers(&dry.breakers),
            None => Arc::new([]),
        };
        for (prompt, params) in &self.prompts {
            let own: &[u32] =
                if params.ignore_eos { &[] } else { self.model.text.tokenizer.end_of_generation() };
            let stop_tokens: Arc<[u32]> = [&params.stop_tokens, own].concat().into();
            calls.extend((0..params.best_of).map(|choice| Call {
                request_id: self.origin.request_id.clone(),
                model: self.model.key().clone(),
                prompt: prompt.clone(),
                params: params.clone(),
                stop_tokens: stop_tokens.clone(),
                dry_breakers: dry_breakers.clone(),
                choice,
                tenant,
            }));
        }
        calls
    }
}
