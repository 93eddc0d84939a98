// SPDX-License-Identifier: Apache-2.0

//! Tests of a pool whose watchdog the test ticks itself, and of one with its real watchdog. The end
//! of a test releases every job that still blocks.

use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;

/// Long enough for a loaded machine; the awaited events take milliseconds.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
const MAX_WATCHDOG_TICKS: u32 = 3;

fn config(threads: usize, queue_max: usize) -> PoolConfig {
    PoolConfig {
        thread_name: "pool",
        stack_bytes: 1 << 20,
        threads,
        queue_max,
        max_watchdog_ticks: MAX_WATCHDOG_TICKS,
        lost_threads: Arc::default(),
    }
}

/// A pool of one thread; the test ticks the watchdog with [`tick_until_overdue`].
pub(crate) fn pool_without_watchdog<J: Send, R>(
    queue_max: usize,
    new_handler: impl Fn() -> JobHandler<J, R> + Send + Sync + 'static,
) -> Arc<WorkerPool<J, R>> {
    WorkerPool::without_watchdog(config(1, queue_max), new_handler).unwrap()
}

/// A pool whose jobs end only through [`run_next_job`] and [`fail_next_job`].
pub(crate) fn pool_without_threads<J: Send, R>(
    new_handler: impl Fn() -> JobHandler<J, R> + Send + Sync + 'static,
) -> Arc<WorkerPool<J, R>> {
    WorkerPool::without_watchdog(config(0, usize::MAX), new_handler).unwrap()
}

/// Runs the first queued job on the test's thread.
pub(crate) fn run_next_job<J: Send, R>(pool: &WorkerPool<J, R>) {
    assert_ne!(queued_jobs(pool), 0);
    let (id, job) = pool.shared.next_job().unwrap();
    let result = (pool.shared.new_handler)()(job);
    finish_job(pool, id, Ok(result));
}

pub(crate) fn fail_next_job<J: Send, R>(pool: &WorkerPool<J, R>, failure: JobFailure) {
    assert_ne!(queued_jobs(pool), 0);
    let (id, _) = pool.shared.next_job().unwrap();
    finish_job(pool, id, Err(failure));
}

fn finish_job<J: Send, R>(pool: &WorkerPool<J, R>, id: u64, result: Result<R, JobFailure>) {
    let callback = pool.shared.take_callback(id).unwrap();
    callback(result);
}

pub(crate) fn queued_jobs<J: Send, R>(pool: &WorkerPool<J, R>) -> usize {
    pool.shared.lock().queue.len()
}

/// Makes every running job overdue. Returns whether the process may go on.
pub(crate) fn tick_until_overdue<J: Send, R>(pool: &WorkerPool<J, R>) -> bool {
    (0..MAX_WATCHDOG_TICKS).for_each(|_| assert!(pool.shared.tick()));
    pool.shared.tick()
}

enum JobAction {
    Pass,
    Panic,
    /// Blocks until the sender is dropped.
    Block(Receiver<()>),
}

/// A job that sends its name when it begins.
struct TestJob(Sender<&'static str>, &'static str, JobAction);

fn new_handler() -> JobHandler<TestJob, &'static str> {
    Box::new(|TestJob(begun, name, action)| {
        // The receiver is gone once the test has ended.
        begun.send(name).ok();
        match action {
            JobAction::Pass => {}
            JobAction::Panic => panic!("as the test wants"),
            JobAction::Block(released) => drop(released.recv()),
        }
        name
    })
}

type Results = Receiver<(&'static str, Result<&'static str, JobFailure>)>;

/// Submits jobs and receives which jobs began and how they ended.
struct JobClient {
    pool: Arc<WorkerPool<TestJob, &'static str>>,
    begun_sender: Sender<&'static str>,
    begun: Receiver<&'static str>,
    result_sender: Sender<(&'static str, Result<&'static str, JobFailure>)>,
    results: Results,
}

impl JobClient {
    fn new(pool: Arc<WorkerPool<TestJob, &'static str>>) -> Self {
        let ((begun_sender, begun), (result_sender, results)) = (channel(), channel());
        Self { pool, begun_sender, begun, result_sender, results }
    }

    fn submit(&self, name: &'static str, action: JobAction) -> JobTicket<TestJob, &'static str> {
        let results = self.result_sender.clone();
        let job = TestJob(self.begun_sender.clone(), name, action);
        self.pool
            .submit(job, move |result| {
                results.send((name, result)).ok();
            })
            .unwrap()
    }

    fn expect_begun(&self, name: &str) {
        assert_eq!(self.begun.recv_timeout(TIMEOUT).expect("a job begins in time"), name);
    }

    fn expect_result(&self, name: &str, result: Result<&str, JobFailure>) {
        assert_eq!(self.results.recv_timeout(TIMEOUT).expect("a job ends in time"), (name, result));
    }
}

#[test]
fn jobs_whose_tickets_are_dropped_neither_run_nor_stay_in_the_queue() {
    let client = JobClient::new(pool_without_watchdog(1000, new_handler));
    let (release, released) = channel();
    let blocks = client.submit("blocks", JobAction::Block(released));
    client.expect_begun("blocks");
    let dropped: Vec<_> = (0..999).map(|_| client.submit("dropped", JobAction::Pass)).collect();
    let stays = client.submit("stays", JobAction::Pass);
    let job = TestJob(client.begun_sender.clone(), "full", JobAction::Pass);
    let full = client.pool.submit(job, |_| unreachable!());
    assert!(matches!(full, Err(PoolQueueFull)));
    drop(dropped);
    assert_eq!(queued_jobs(&client.pool), 1);
    assert!(!blocks.cancel(), "the job has begun");
    drop(release);
    client.expect_result("blocks", Ok("blocks"));
    client.expect_begun("stays");
    client.expect_result("stays", Ok("stays"));
    assert!(!stays.cancel());
    drop(client.begun_sender);
    drop(client.result_sender);
    let shared = Arc::downgrade(&client.pool.shared);
    drop((client.pool, blocks, stays));
    assert!(client.begun.recv_timeout(TIMEOUT).is_err() && client.results.recv_timeout(TIMEOUT).is_err());
    let start = std::time::Instant::now();
    while shared.strong_count() > 0 {
        assert!(start.elapsed() < TIMEOUT, "the threads of a dropped pool end");
        thread::yield_now();
    }
}

#[test]
fn an_overdue_job_costs_its_thread_even_if_its_ticket_is_dropped() {
    let client = JobClient::new(pool_without_watchdog(10, new_handler));
    let (release, released) = channel();
    let blocks = client.submit("blocks", JobAction::Block(released));
    client.expect_begun("blocks");
    drop(blocks);
    let _next = client.submit("next", JobAction::Pass);
    (0..MAX_WATCHDOG_TICKS).for_each(|_| assert!(client.pool.shared.tick()));
    assert!(
        client.results.try_recv().is_err() && queued_jobs(&client.pool) == 1,
        "the job is within its limit"
    );
    assert!(client.pool.shared.tick());
    client.expect_result("blocks", Err(JobFailure::Overdue));
    client.expect_result("next", Ok("next"));
    // The overdue job ends after all: its callback does not run again, and its thread is not one
    // too many.
    drop(release);
    let _last = client.submit("last", JobAction::Pass);
    client.expect_result("last", Ok("last"));
    assert!(client.results.try_recv().is_err());
    assert_eq!(client.pool.shared.lock().threads, 1);
}

#[test]
fn a_job_that_panics_costs_its_thread() {
    let client = JobClient::new(pool_without_watchdog(10, new_handler));
    let _tickets = [client.submit("panics", JobAction::Panic), client.submit("next", JobAction::Pass)];
    client.expect_result("panics", Err(JobFailure::Panicked));
    client.expect_result("next", Ok("next"));
}

#[test]
fn a_thread_that_is_always_busy_with_short_jobs_is_not_lost() {
    let client = JobClient::new(pool_without_watchdog(10, new_handler));
    for _ in 0..20 {
        let (release, released) = channel();
        let _ticket = client.submit("short", JobAction::Block(released));
        client.expect_begun("short");
        (0..MAX_WATCHDOG_TICKS).for_each(|_| assert!(client.pool.shared.tick()));
        drop(release);
        client.expect_result("short", Ok("short"));
    }
    assert_eq!(client.pool.shared.config.lost_threads.0.load(Ordering::Relaxed), 0);
}

#[test]
fn a_process_that_has_lost_too_many_threads_must_end() {
    let client = JobClient::new(pool_without_watchdog(LOST_THREADS_MAX + 1, new_handler));
    let (releases, tickets): (Vec<_>, Vec<_>) = (0..=LOST_THREADS_MAX)
        .map(|_| {
            let (release, released) = channel();
            (release, client.submit("blocks", JobAction::Block(released)))
        })
        .unzip();
    for _ in 0..LOST_THREADS_MAX {
        client.expect_begun("blocks");
        assert!(tick_until_overdue(&client.pool));
        client.expect_result("blocks", Err(JobFailure::Overdue));
    }
    client.expect_begun("blocks");
    assert!(!tick_until_overdue(&client.pool));
    drop((releases, tickets));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_started_pool_has_a_watchdog_that_needs_no_caller() {
    let config = PoolConfig { max_watchdog_ticks: 0, ..config(1, 10) };
    let client = JobClient::new(WorkerPool::start(config, new_handler).unwrap());
    let (_release, released) = channel();
    let blocks = client.submit("blocks", JobAction::Block(released));
    client.expect_begun("blocks");
    drop(blocks);
    let _next = client.submit("next", JobAction::Pass);
    // The result of "next" is not checked: a tick may find that job overdue too.
    client.expect_begun("next");
}
