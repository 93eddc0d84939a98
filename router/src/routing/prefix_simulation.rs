// SPDX-License-Identifier: Apache-2.0

//! Simulation of prefix-aware routing: chats of many turns over workers with finite caches, with
//! late events or none, deaths, one hot prompt, and a flood. Seeds are fixed, so a run repeats.
//!
//! 1. Four workers find at least 95% of what one worker with their caches together finds.
//! 2. For the sake of its cache, no worker gets a stream beyond the slack.
//! 3. The longest wait for a first token is at most [`WAIT_FACTOR`] times that of least-loaded
//!    routing, and [`WAIT_SLACK`] beyond.

mod cached_worker;

use cached_worker::{CachedStream, CachedWorker, StreamEvent};

use super::simulation::RoutingRng;
use super::*;

const TICK: Duration = Duration::from_millis(20);
const SEATS: usize = 24;
const CACHE_TOKENS: u64 = 40_000;
const OUTPUT_TOKENS: u64 = 48;
const TURNS: u32 = 8;
const WAIT_FACTOR: f64 = 1.25;
const WAIT_SLACK: Duration = Duration::from_millis(500);

/// What clients do.
#[derive(Clone, Copy)]
struct ChatScenario {
    workers: u64,
    users: u64,
    seconds: u64,
    /// Tokens that all prompts begin with.
    shared_tokens: u64,
    /// Think time of the first user in ticks, and of each other one in percent of the one before.
    think: u64,
    skew: u64,
    /// Requests with one prompt that a tenant sends at once, every 10 s.
    flood: u64,
    /// Whether a worker dies every 5 s, for a second.
    deaths: bool,
    /// Whether KV cache events reach the router.
    events: bool,
    /// Whether clients name their session.
    sessions: bool,
}

const CHATS: ChatScenario = ChatScenario {
    workers: 4,
    users: 64,
    seconds: 120,
    shared_tokens: 64,
    think: 300,
    skew: 100,
    flood: 0,
    deaths: false,
    events: true,
    sessions: false,
};

struct User {
    tokens: Vec<u32>,
    turn: u32,
    think: u64,
    /// When the next turn is sent. `None` while one runs.
    next_at: Option<u64>,
}

struct Open {
    /// `None`: of the flood.
    user: Option<usize>,
    placement: Option<StreamPlacement>,
    sent_at: u64,
    tokens: Vec<u32>,
}

#[derive(Debug, Default)]
struct Outcome {
    hit_rate: f64,
    longest_wait: Duration,
    completed: u64,
    /// Of each worker.
    prompt_tokens: Vec<u64>,
    reasons: BTreeMap<&'static str, u64>,
}

struct ChatSimulation {
    scenario: ChatScenario,
    rng: RoutingRng,
    policy: RoutingPolicy,
    model: ModelKey,
    tick: u64,
    workers: BTreeMap<WorkerId, CachedWorker>,
    down: Vec<(u64, Arc<str>)>,
    users: Vec<User>,
    open: BTreeMap<u64, Open>,
    next: u64,
    next_token: u32,
    lost_tokens: (u64, u64),
    outcome: Outcome,
}

impl ChatSimulation {
    fn new(scenario: ChatScenario, mode: RoutingMode, seed: u64) -> Self {
        let mut chats = Self {
            scenario,
            rng: RoutingRng(seed),
            policy: RoutingPolicy::new(mode),
            model: ModelKey::numbered(0),
            tick: 0,
            workers: BTreeMap::new(),
            down: Vec::new(),
            users: Vec::new(),
            open: BTreeMap::new(),
            next: 0,
            next_token: 1 << 20,
            lost_tokens: (0, 0),
            outcome: Outcome::default(),
        };
        (0..scenario.workers).for_each(|n| chats.add_worker(format!("worker-{n}").into()));
        let mut think = scenario.think;
        for _ in 0..scenario.users {
            let next_at = Some(chats.rng.below(200));
            chats.users.push(User { tokens: Vec::new(), turn: 0, think, next_at });
            think = (think * scenario.skew / 100).max(5);
        }
        chats
    }

    fn now(&self) -> RouterTime {
        TICK * self.tick as u32
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn add_worker(&mut self, name: Arc<str>) {
        let id = WorkerId(self.number());
        // One worker has the seats and caches of four.
        let size = 4 / self.scenario.workers;
        let (model, device) = (self.model.clone(), "host".into());
        let (running_max, kv_tokens) = ((SEATS as u64 * size) as u32, CACHE_TOKENS * size);
        let profile = WorkerProfile { name, model, device, running_max, kv_tokens };
        self.policy.add_worker(id, profile, self.now());
        self.workers.insert(id, CachedWorker::new(size, SEATS, CACHE_TOKENS));
    }

    fn fresh(&mut self, count: u64) -> Vec<u32> {
        let first = self.next_token;
        self.next_token += count as u32;
        (first..self.next_token).collect()
    }

    fn send(&mut self, user: Option<usize>, tokens: Vec<u32>, sent_at: u64) {
        let number = self.number();
        let prefix = PromptPrefix::new("", &tokens);
        // The flood is one session.
        let session = self.scenario.sessions.then(|| SessionKey::new("", format!("{user:?}").as_bytes()));
        let model = self.model.clone();
        let demand = StreamDemand {
            input_tokens: tokens.len() as u64,
            output_tokens_max: OUTPUT_TOKENS,
            prefix: &prefix,
            session,
            ..StreamDemand::none(&model)
        };
        let before: BTreeMap<WorkerId, u32> =
            self.policy.workers.iter().map(|(&id, load)| (id, load.streams())).collect();
        let placement = self.policy.place_stream(&demand, &[], None, self.now());
        let placement = placement.expect("a worker is chosen while there is one");
        let (chosen, least) = (before[&placement.worker], before.values().min().unwrap());
        if matches!(placement.reason, RoutingReason::Prefix | RoutingReason::Session) {
            assert!(
                chosen <= least + least / 2 + SEATS as u32 / 4,
                "{placement:?} with {chosen} streams, another has {least}"
            );
        }
        *self.outcome.reasons.entry(placement.reason.name()).or_default() += 1;
        let mut whole = tokens.clone();
        whole.extend((0..OUTPUT_TOKENS as u32).map(|n| tokens[tokens.len() - 1].wrapping_mul(31) + n));
        let stream = CachedStream {
            number,
            blocks: PromptPrefix::new("", &whole),
            prompt_tokens: tokens.len() as u64,
            output_tokens: OUTPUT_TOKENS,
        };
        self.workers.get_mut(&placement.worker).unwrap().start(stream);
        self.open.insert(number, Open { user, placement: Some(placement), sent_at, tokens: whole });
    }

    fn send_due(&mut self) {
        for index in 0..self.users.len() {
            if self.users[index].next_at.is_none_or(|at| at > self.tick) {
                continue;
            }
            if self.users[index].turn.is_multiple_of(TURNS) {
                let own = self.fresh(200);
                self.users[index].tokens = (0..self.scenario.shared_tokens as u32).chain(own).collect();
            }
            let added = 20 + self.rng.below(80);
            let added = self.fresh(added);
            let user = &mut self.users[index];
            user.tokens.extend(added);
            (user.next_at, user.turn) = (None, user.turn + 1);
            let tokens = user.tokens.clone();
            self.send(Some(index), tokens, self.tick);
        }
        if self.scenario.flood > 0 && self.tick % 500 == 100 {
            let prompt = self.fresh(1000);
            (0..self.scenario.flood).for_each(|_| self.send(None, prompt.clone(), self.tick));
        }
    }

    fn run_workers(&mut self) {
        let ids: Vec<WorkerId> = self.workers.keys().copied().collect();
        for id in ids {
            let worker = self.workers.get_mut(&id).unwrap();
            // The router hears of a tick with the next one.
            let changes = std::mem::take(&mut worker.changes);
            let (events, (running, waiting)) = (worker.tick(), worker.load());
            if self.scenario.events {
                self.policy.apply_kv_changes(id, &changes);
                self.policy.set_kv_feed(id, KvEventFeed::Live);
            }
            if self.tick.is_multiple_of(12) {
                let report = WorkerReport { running, waiting, steps: self.tick, ..WorkerReport::default() };
                self.policy.update_load(id, report, self.now());
            }
            events.into_iter().for_each(|event| self.handle(event));
        }
    }

    fn handle(&mut self, event: StreamEvent) {
        match event {
            StreamEvent::FirstToken(number) => {
                let open = self.open.get_mut(&number).unwrap();
                self.policy.end_prefill(open.placement.as_mut().unwrap());
                if open.user.is_some() {
                    let wait = TICK * (self.tick - open.sent_at) as u32;
                    self.outcome.longest_wait = self.outcome.longest_wait.max(wait);
                }
            }
            StreamEvent::Ended(number) => {
                let open = self.open.remove(&number).unwrap();
                self.policy.end_stream(open.placement.unwrap(), self.now());
                self.outcome.completed += 1;
                if let Some(user) = open.user {
                    let think = self.users[user].think / 2 + self.rng.below(self.users[user].think);
                    let user = &mut self.users[user];
                    (user.tokens, user.next_at) = (open.tokens, Some(self.tick + think));
                }
            }
        }
    }

    fn kill_and_restart(&mut self) {
        let restarted: Vec<_> = self.down.extract_if(.., |(at, _)| *at <= self.tick).collect();
        restarted.into_iter().for_each(|(_, name)| self.add_worker(name));
        if !self.scenario.deaths || self.tick % 250 != 249 || self.workers.len() < 2 {
            return;
        }
        let victim = *self.workers.keys().nth(self.rng.below(self.workers.len() as u64) as usize).unwrap();
        let name = self.policy.workers[&victim].profile.name.clone();
        self.policy.remove_worker(victim);
        let dead = self.workers.remove(&victim).unwrap();
        self.lost_tokens.0 += dead.cached_tokens;
        self.lost_tokens.1 += dead.prompt_tokens;
        self.down.push((self.tick + 50, name));
        let is_lost = |open: &Open| open.placement.as_ref().is_some_and(|p| p.worker == victim);
        let lost: Vec<u64> = self.open.iter().filter(|(_, open)| is_lost(open)).map(|(&n, _)| n).collect();
        for number in lost {
            let mut open = self.open.remove(&number).unwrap();
            self.policy.end_stream(open.placement.take().unwrap(), self.now());
            open.tokens.truncate(open.tokens.len() - OUTPUT_TOKENS as usize);
            self.send(open.user, open.tokens, open.sent_at);
        }
    }

    fn run(mut self) -> Outcome {
        for _ in 0..self.scenario.seconds * 50 {
            self.tick += 1;
            self.kill_and_restart();
            self.send_due();
            self.run_workers();
            for &id in self.workers.keys() {
                assert!(self.policy.prefix_index(id).0 < 1 << 20, "40,000 tokens are 2,500 blocks");
            }
        }
        let (cached, all) = self.workers.values().fold(self.lost_tokens, |(cached, all), worker| {
            (cached + worker.cached_tokens, all + worker.prompt_tokens)
        });
        self.outcome.hit_rate = cached as f64 / all as f64;
        self.outcome.prompt_tokens = self.workers.values().map(|worker| worker.prompt_tokens).collect();
        self.outcome
    }
}

fn run(scenario: ChatScenario, mode: RoutingMode, seed: u64) -> Outcome {
    ChatSimulation::new(scenario, mode, seed).run()
}

/// Runs the scenario prefix-aware and least-loaded, and compares the waits.
fn compare(scenario: ChatScenario, seed: u64) -> (Outcome, Outcome) {
    let [aware, spread] = [RoutingMode::Auto, RoutingMode::LeastLoaded].map(|mode| run(scenario, mode, seed));
    let allowed = spread.longest_wait.mul_f64(WAIT_FACTOR) + WAIT_SLACK;
    assert!(aware.longest_wait <= allowed, "{:?}, {:?} spread", aware.longest_wait, spread.longest_wait);
    (aware, spread)
}

const SEEDS: std::ops::Range<u64> = 0..2;

#[test]
fn chats_of_64_users_over_four_workers_hit_as_one_worker_does() {
    for seed in SEEDS {
        let one = run(ChatScenario { workers: 1, ..CHATS }, RoutingMode::Auto, seed);
        let (four, spread) = compare(CHATS, seed);
        assert!(four.hit_rate >= 0.95 * one.hit_rate, "{four:?}, one worker {one:?}");
        assert!(spread.hit_rate < 0.8 * one.hit_rate, "the comparison must be able to fail");
        // Without events, and with the hint of a session.
        for (events, sessions) in [(false, false), (true, true), (false, true)] {
            let four = run(ChatScenario { events, sessions, ..CHATS }, RoutingMode::Auto, seed);
            assert!(four.hit_rate >= 0.9 * one.hit_rate, "{four:?}, one worker {one:?}");
        }
    }
}

#[test]
fn chats_on_busy_workers_still_hit_and_wait_no_longer() {
    for seed in SEEDS {
        let busy = ChatScenario { think: 100, seconds: 60, ..CHATS };
        let one = run(ChatScenario { workers: 1, ..busy }, RoutingMode::Auto, seed);
        let (four, spread) = compare(busy, seed);
        assert!(four.hit_rate >= 0.95 * one.hit_rate, "{four:?}, one worker {one:?}");
        assert!(four.completed > spread.completed);
    }
}

#[test]
fn a_hot_prompt_of_all_users_spreads_over_the_workers() {
    for seed in SEEDS {
        // One turn of each chat in eight begins anew, after 2,000 shared tokens.
        let hot = ChatScenario { shared_tokens: 2000, think: 150, seconds: 60, ..CHATS };
        let (aware, _) = compare(hot, seed);
        assert!(aware.hit_rate > 0.9, "{aware:?}");
        let (least, most) = (aware.prompt_tokens.iter().min(), aware.prompt_tokens.iter().max());
        assert!(most < least.map(|least| 2 * least).as_ref(), "{aware:?}");
    }
}

#[test]
fn workers_that_die_and_return_lose_no_stream_and_get_their_share() {
    for seed in SEEDS {
        let dying = ChatScenario { deaths: true, ..CHATS };
        let (aware, spread) = compare(dying, seed);
        assert!(aware.hit_rate > spread.hit_rate, "{aware:?}, {spread:?}");
        assert!(aware.completed * 100 >= spread.completed * 98, "{aware:?}, {spread:?}");
    }
}

#[test]
fn users_of_very_different_activity_are_all_served_in_time() {
    for seed in SEEDS {
        // The most active user sends thirty times as often as the first.
        let (aware, spread) = compare(ChatScenario { skew: 94, ..CHATS }, seed);
        assert!(aware.hit_rate > spread.hit_rate && aware.completed > spread.completed);
    }
}

#[test]
fn a_flood_of_one_prompt_delays_others_no_longer_than_if_it_were_spread() {
    for seed in SEEDS {
        let (aware, spread) = compare(ChatScenario { flood: 60, users: 32, sessions: true, ..CHATS }, seed);
        assert!(aware.completed >= spread.completed, "{aware:?}, {spread:?}");
    }
}
