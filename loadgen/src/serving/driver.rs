// SPDX-License-Identifier: Apache-2.0

//! Sends the requests of a run and records what comes of each.
//!
//! - *Open loop* (a finite rate, or all at once): requests are sent on schedule, however the server
//!   fares. Latencies count from the scheduled arrival. If the client, or its limit of concurrency,
//!   sends a request late, the wait is part of the latency (no coordinated omission).
//! - *Closed loop* (an unlimited rate with a limit of concurrency): a request is sent when another
//!   one has ended. A server that stalls then gets fewer requests, so the count of slow requests
//!   says little.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::answer::{RequestFailure, StreamedAnswer};
use super::arrivals::{ArrivalError, Arrivals, RequestRate};
use super::client::ServingClient;
use super::mix::{ConversationTurn, ServingMix};
use super::target::{PastTurn, RequestTemplate};

/// Conversations of one run. Their records must fit into memory: some KiB each.
pub const CONVERSATIONS_MAX: u64 = 1_000_000;
/// Arrivals that wait for their task. The task starts at once, so that more are never there.
const ARRIVALS_QUEUED_MAX: usize = 1024;
/// Separates the random numbers of arrivals from those of prompts.
const ARRIVAL_STREAM: u64 = 0x6172_7269_7661_6c73;

/// How much load, and when.
#[derive(Clone, Debug, PartialEq)]
pub struct ServingLoad {
    pub rate: RequestRate,
    pub burstiness: f64,
    pub max_concurrency: Option<usize>,
    /// The number of the first conversation in the mix.
    pub first: u64,
    /// Conversations of the run.
    pub conversations: u64,
    /// No conversation begins after this time.
    pub duration: Option<Duration>,
}

impl ServingLoad {
    /// Whether a conversation begins when another one ends.
    pub fn is_closed_loop(&self) -> bool {
        self.rate == RequestRate::Unlimited && self.max_concurrency.is_some()
    }
}

/// One request. Times count from the start of the run.
#[derive(Clone, Debug, PartialEq)]
pub struct SentRequest {
    /// When the request should have been sent. Latencies count from here.
    pub scheduled: Duration,
    /// Time that the request then waited for the limit of concurrency.
    pub queue_time: Duration,
    pub sent: Duration,
    pub ended: Duration,
    pub outcome: Result<StreamedAnswer, RequestFailure>,
}

impl SentRequest {
    /// How late the client itself was.
    pub fn send_delay(&self) -> Duration {
        self.sent.saturating_sub(self.scheduled + self.queue_time)
    }
}

/// A finished run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServingRun {
    /// In the order of their schedule.
    pub requests: Vec<SentRequest>,
    /// Until the last request ended.
    pub duration: Duration,
    /// Later turns of conversations that a failure ended.
    pub turns_not_sent: u64,
}

/// What the tasks of a run share.
struct Run {
    client: ServingClient,
    template: RequestTemplate,
    began: Instant,
    concurrency: Option<Semaphore>,
}

/// Drives the whole load. Returns when the last request has ended.
pub async fn drive(
    client: &ServingClient,
    template: &RequestTemplate,
    mix: &Arc<ServingMix>,
    load: &ServingLoad,
) -> Result<ServingRun, ArrivalError> {
    let arrivals = Arrivals::new(load.rate, load.burstiness, mix.seed ^ ARRIVAL_STREAM)?;
    let is_closed = load.is_closed_loop();
    let concurrency = load.max_concurrency.filter(|_| !is_closed).map(Semaphore::new);
    let (client, template) = (client.clone(), template.clone());
    // A burst waits for its prompts: they are made before the clock starts.
    let is_burst = !is_closed && load.rate == RequestRate::Unlimited;
    let ready = match is_burst {
        true => (0..load.conversations).map(|index| mix.conversation(load.first + index)).collect(),
        false => Vec::new(),
    };
    let run = Arc::new(Run { client, template, began: Instant::now(), concurrency });
    let finished = match is_closed {
        true => closed_loop(&run, mix, load).await,
        false => open_loop(&run, mix, load, arrivals, ready).await,
    };
    Ok(collect(finished))
}

type Finished = (Vec<SentRequest>, u64);

/// Sorts the records of all conversations.
fn collect(finished: Vec<Finished>) -> ServingRun {
    let mut run = ServingRun::default();
    for (requests, not_sent) in finished {
        run.requests.extend(requests);
        run.turns_not_sent += not_sent;
    }
    run.requests.sort_by_key(|request| request.scheduled);
    run.duration = run.requests.iter().map(|request| request.ended).max().unwrap_or_default();
    run
}

async fn open_loop(
    run: &Arc<Run>,
    mix: &Arc<ServingMix>,
    load: &ServingLoad,
    arrivals: Arrivals,
    ready: Vec<Vec<ConversationTurn>>,
) -> Vec<Finished> {
    let mut due = pace(run.began, Arc::clone(mix), load.clone(), arrivals, ready);
    let (mut running, mut finished) = (JoinSet::new(), Vec::new());
    while let Some((scheduled, turns)) = due.recv().await {
        let run = Arc::clone(run);
        running.spawn(async move { run.converse(turns, scheduled).await });
        while let Some(ended) = running.try_join_next() {
            finished.extend(ended);
        }
    }
    while let Some(ended) = running.join_next().await {
        finished.extend(ended);
    }
    finished
}

/// A thread that hands out each conversation at its time. The timer of the runtime has steps of a
/// millisecond, that of a thread is some ten times finer. The thread makes each prompt before it
/// sleeps.
fn pace(
    began: Instant,
    mix: Arc<ServingMix>,
    load: ServingLoad,
    arrivals: Arrivals,
    ready: Vec<Vec<ConversationTurn>>,
) -> mpsc::Receiver<(Duration, Vec<ConversationTurn>)> {
    let (sender, receiver) = mpsc::channel(ARRIVALS_QUEUED_MAX);
    tokio::task::spawn_blocking(move || {
        let mut ready = ready.into_iter();
        for (index, at) in (0..load.conversations).zip(arrivals) {
            if load.duration.is_some_and(|duration| at >= duration) {
                return;
            }
            let turns = ready.next().unwrap_or_else(|| mix.conversation(load.first + index));
            std::thread::sleep(at.saturating_sub(began.elapsed()));
            if sender.blocking_send((at, turns)).is_err() {
                return;
            }
        }
    });
    receiver
}

async fn closed_loop(run: &Arc<Run>, mix: &Arc<ServingMix>, load: &ServingLoad) -> Vec<Finished> {
    let next = Arc::new(AtomicU64::new(0));
    let mut clients = JoinSet::new();
    for _ in 0..load.max_concurrency.unwrap_or(1) {
        let (run, mix, load, next) = (Arc::clone(run), Arc::clone(mix), load.clone(), Arc::clone(&next));
        clients.spawn(async move {
            let mut finished = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let is_over = load.duration.is_some_and(|duration| run.began.elapsed() >= duration);
                if index >= load.conversations || is_over {
                    return finished;
                }
                let turns = mix.conversation(load.first + index);
                let now = run.began.elapsed();
                finished.push(run.converse(turns, now).await);
            }
        });
    }
    clients.join_all().await.into_iter().flatten().collect()
}

impl Run {
    /// Sends the turns of a conversation one after the other. A failure ends it.
    async fn converse(&self, turns: Vec<ConversationTurn>, scheduled: Duration) -> Finished {
        let (mut past, mut records, mut scheduled) = (Vec::new(), Vec::new(), scheduled);
        let count = turns.len();
        for turn in turns {
            scheduled += turn.think_time;
            if !turn.think_time.is_zero() {
                tokio::time::sleep_until(self.began + scheduled).await;
            }
            let record = self.ask(&past, &turn, scheduled).await;
            scheduled = record.ended;
            let answer = record.outcome.as_ref().ok().map(|answer| answer.text.clone());
            records.push(record);
            let Some(answer) = answer else { break };
            past.push(PastTurn { prompt: turn.prompt, answer });
        }
        let not_sent = (count - records.len()) as u64;
        (records, not_sent)
    }

    async fn ask(&self, past: &[PastTurn], turn: &ConversationTurn, scheduled: Duration) -> SentRequest {
        let request = self.client.request(&self.template, past, &turn.prompt, turn.output_tokens);
        let asked = self.began.elapsed();
        let permit = match &self.concurrency {
            // The semaphore is never closed, so that there is a permit.
            Some(concurrency) => concurrency.acquire().await.ok(),
            None => None,
        };
        let sent = self.began.elapsed();
        let outcome = self.client.stream(request, self.began).await;
        drop(permit);
        let queue_time = if self.concurrency.is_some() { sent - asked } else { Duration::ZERO };
        SentRequest { scheduled, queue_time, sent, ended: self.began.elapsed(), outcome }
    }
}
