// SPDX-License-Identifier: Apache-2.0

//! Simulation of packed routing: random streams on two GPUs, late reports, workers that stall, die
//! and come back. A failure prints its seed.
//!
//! Each placement is checked against the state that the simulation keeps by itself:
//!
//! 1. A full worker gets a stream only if no worker that reports is free.
//! 2. A stream wakes an idle worker only if no busy worker of that GPU has room by seats and KV.
//! 3. A worker that has been silent for 5 s gets a stream only if no worker that reports is free.
//! 4. Every stream of a lost worker is placed again at once.
//! 5. After a time of few streams, each GPU has one busy worker.

use proptest::prelude::*;

use super::*;

const WORKERS: u64 = 8;
const RUNNING_MAX: u32 = 8;
const KV_TOKENS: u64 = 8_000;
const REPORT_PERIOD: RouterTime = Duration::from_millis(250);
const STEPS_PER_SEED: u64 = 1_500;

/// SplitMix64.
pub(super) struct RoutingRng(pub(super) u64);

impl RoutingRng {
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

struct SimulatedStream {
    placement: StreamPlacement,
    input_tokens: u64,
    output_tokens_max: u64,
    ends_at: RouterTime,
}

/// What a worker really does.
struct SimulatedWorker {
    steps: u64,
    /// It neither reports nor ends streams until then.
    stalled_until: RouterTime,
    silent_since: RouterTime,
}

struct RoutingSimulation {
    rng: RoutingRng,
    policy: RoutingPolicy,
    model: ModelKey,
    now: RouterTime,
    workers: BTreeMap<WorkerId, SimulatedWorker>,
    streams: Vec<SimulatedStream>,
    next_id: u64,
    woken: u64,
}

fn device_of(worker: WorkerId) -> u64 {
    worker.0 % 2
}

impl RoutingSimulation {
    fn new(seed: u64) -> Self {
        let mut simulation = Self {
            rng: RoutingRng(seed),
            policy: RoutingPolicy::new(RoutingMode::Packed),
            model: ModelKey::numbered(0),
            now: Duration::ZERO,
            workers: BTreeMap::new(),
            streams: Vec::new(),
            next_id: 0,
            woken: 0,
        };
        (0..WORKERS).for_each(|_| simulation.add_worker());
        simulation
    }

    fn add_worker(&mut self) {
        let id = WorkerId(self.next_id);
        self.next_id += 1;
        let device = format!("GPU-{}", device_of(id)).into();
        let model = self.model.clone();
        let name = id.0.to_string().into();
        let profile = WorkerProfile { name, model, device, running_max: RUNNING_MAX, kv_tokens: KV_TOKENS };
        self.policy.add_worker(id, profile, self.now);
        let worker = SimulatedWorker { steps: 0, stalled_until: Duration::ZERO, silent_since: self.now };
        self.workers.insert(id, worker);
    }

    fn streams_on(&self, worker: WorkerId) -> u32 {
        self.streams.iter().filter(|stream| stream.placement.worker == worker).count() as u32
    }

    fn kv_used(&self, worker: WorkerId) -> u64 {
        let streams = self.streams.iter().filter(|stream| stream.placement.worker == worker);
        streams.map(|stream| stream.input_tokens + stream.output_tokens_max).sum()
    }

    fn is_silent(&self, worker: WorkerId) -> bool {
        self.now - self.workers[&worker].silent_since > Duration::from_secs(5)
    }

    fn place(&mut self, input_tokens: u64, output_tokens_max: u64) {
        let demand = StreamDemand { input_tokens, output_tokens_max, ..StreamDemand::none(&self.model) };
        let placement = self.policy.place_stream(&demand, &[], None, self.now);
        let placement = placement.expect("a worker is chosen while there is one");
        self.check(placement.worker, input_tokens + output_tokens_max);
        let ends_at = self.now + Duration::from_millis(500 + self.rng.below(20_000));
        self.streams.push(SimulatedStream { placement, input_tokens, output_tokens_max, ends_at });
    }

    fn check(&mut self, chosen: WorkerId, kv_tokens: u64) {
        let is_free = |id: &WorkerId| self.streams_on(*id) < RUNNING_MAX;
        let reports = |id: &WorkerId| self.workers[id].silent_since == self.now;
        let usable: Vec<WorkerId> =
            self.workers.keys().copied().filter(|id| is_free(id) && reports(id)).collect();
        let is_good = is_free(&chosen) && !self.is_silent(chosen);
        assert!(usable.is_empty() || is_good, "{chosen:?} instead of {usable:?}");
        if self.streams_on(chosen) > 0 {
            return;
        }
        self.woken += 1;
        let has_room = |id: &&WorkerId| {
            device_of(**id) == device_of(chosen)
                && self.streams_on(**id) > 0
                && self.kv_used(**id) + kv_tokens <= KV_TOKENS / 8 * 7
        };
        let busy: Vec<&WorkerId> = usable.iter().filter(has_room).collect();
        assert!(busy.is_empty(), "{chosen:?} was idle, {busy:?} were busy and had room");
    }

    fn lose_worker(&mut self, worker: WorkerId) {
        self.policy.remove_worker(worker);
        self.workers.remove(&worker);
        let (lost, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.streams).into_iter().partition(|s| s.placement.worker == worker);
        self.streams = rest;
        for stream in lost {
            self.policy.end_stream(stream.placement, self.now);
            self.place(stream.input_tokens, stream.output_tokens_max);
        }
    }

    fn report_all(&mut self) {
        for (&id, worker) in &mut self.workers {
            if worker.stalled_until > self.now {
                continue;
            }
            worker.steps += 1;
            worker.silent_since = self.now;
            let running = self.streams.iter().filter(|s| s.placement.worker == id).count() as u32;
            let report = WorkerReport { running, steps: worker.steps, ..WorkerReport::default() };
            self.policy.update_load(id, report, self.now);
        }
    }

    /// Ends the streams that are due, except on stalled workers.
    fn end_streams(&mut self) {
        let mut index = 0;
        while index < self.streams.len() {
            let stream = &self.streams[index];
            let is_stalled = self.workers[&stream.placement.worker].stalled_until > self.now;
            if is_stalled || stream.ends_at > self.now {
                index += 1;
            } else {
                let ended = self.streams.swap_remove(index);
                self.policy.end_stream(ended.placement, self.now);
            }
        }
    }

    fn step(&mut self, arrivals: u64) {
        self.now += REPORT_PERIOD;
        self.report_all();
        self.end_streams();
        for _ in 0..self.rng.below(arrivals + 1) {
            let (input_tokens, output_tokens_max) = (self.rng.below(1_500), self.rng.below(500));
            self.place(input_tokens, output_tokens_max);
        }
        let ids: Vec<WorkerId> = self.workers.keys().copied().collect();
        let victim = ids[self.rng.below(ids.len() as u64) as usize];
        match self.rng.below(40) {
            0 if ids.len() > 2 => self.lose_worker(victim),
            1 => {
                let stall = Duration::from_millis(self.rng.below(10_000));
                self.workers.get_mut(&victim).unwrap().stalled_until = self.now + stall;
            }
            2..=5 if ids.len() < WORKERS as usize => self.add_worker(),
            _ => {}
        }
    }

    /// Few streams, and no faults, until all older streams have ended.
    fn calm_down(&mut self) {
        for worker in self.workers.values_mut() {
            worker.stalled_until = Duration::ZERO;
        }
        for step in 0..200 {
            self.now += REPORT_PERIOD;
            self.report_all();
            self.end_streams();
            if step % 10 == 0 {
                self.place(100, 100);
            }
        }
        for device in 0..2 {
            let busy = self.workers.keys().filter(|&&id| device_of(id) == device && self.streams_on(id) > 0);
            assert!(busy.count() <= 1, "streams did not gather on GPU {device}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn packed_workers_stay_within_their_bounds(seed in any::<u64>()) {
        let mut simulation = RoutingSimulation::new(seed);
        for step in 0..STEPS_PER_SEED {
            // Times of overload, and of few streams.
            let arrivals = if step / 200 % 2 == 0 { 4 } else { 1 };
            simulation.step(arrivals);
        }
        prop_assert!(simulation.woken > 0);
        simulation.calm_down();
    }
}
