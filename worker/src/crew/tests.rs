//! A crew without a watch, which is looked at by the tests, and one with it. Whoever blocks is released by the test's end.

use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;

/// For a machine under load; what is waited for takes milliseconds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
const LOOKS_MAX: u32 = 3;

fn terms(threads: usize, waiting_max: usize) -> Terms {
    let losses = Arc::default();
    Terms { name: "crew", stack_bytes: 1 << 20, threads, waiting_max, looks_max: LOOKS_MAX, losses }
}

/// One thread, and nobody who watches it.
pub(crate) fn by_hand<J: Send, R>(
    waiting_max: usize,
    tools: impl Fn() -> Tool<J, R> + Send + Sync + 'static,
) -> Arc<Crew<J, R>> {
    Crew::unwatched(terms(1, waiting_max), tools).unwrap()
}

/// Nothing is done but by the two below.
pub(crate) fn unmanned<J: Send, R>(
    tools: impl Fn() -> Tool<J, R> + Send + Sync + 'static,
) -> Arc<Crew<J, R>> {
    Crew::unwatched(terms(0, usize::MAX), tools).unwrap()
}

pub(crate) fn do_next<J: Send, R>(crew: &Crew<J, R>) {
    assert_ne!(waiting(crew), 0);
    let (number, job) = crew.shared.begin().unwrap();
    let done = (crew.shared.tools)()(job);
    answer(crew, number, Ok(done));
}

pub(crate) fn lose_next<J: Send, R>(crew: &Crew<J, R>, how: Lost) {
    assert_ne!(waiting(crew), 0);
    let (number, _) = crew.shared.begin().unwrap();
    answer(crew, number, Err(how));
}

fn answer<J: Send, R>(crew: &Crew<J, R>, number: u64, done: Result<R, Lost>) {
    let answer = crew.shared.take(number).unwrap();
    answer(done);
}

pub(crate) fn waiting<J: Send, R>(crew: &Crew<J, R>) -> usize {
    crew.shared.lock().waiting.len()
}

/// Whatever is at work costs its thread. Whether the process is to go on.
pub(crate) fn look_until_overdue<J: Send, R>(crew: &Crew<J, R>) -> bool {
    (0..LOOKS_MAX).for_each(|_| assert!(crew.shared.look()));
    crew.shared.look()
}

enum Do {
    Pass,
    Panic,
    /// Until the other end is gone.
    Block(Receiver<()>),
}

/// What is done: says that it has begun.
struct Job(Sender<&'static str>, &'static str, Do);

fn tool() -> Tool<Job, &'static str> {
    Box::new(|Job(begun, name, what)| {
        // Nobody listens when the test is over.
        begun.send(name).ok();
        match what {
            Do::Pass => {}
            Do::Panic => panic!("as the test wants"),
            Do::Block(released) => drop(released.recv()),
        }
        name
    })
}

type Answers = Receiver<(&'static str, Result<&'static str, Lost>)>;

/// Asks, and hears of beginnings and answers.
struct Asker {
    crew: Arc<Crew<Job, &'static str>>,
    begins: Sender<&'static str>,
    begun: Receiver<&'static str>,
    answer: Sender<(&'static str, Result<&'static str, Lost>)>,
    answers: Answers,
}

impl Asker {
    fn of(crew: Arc<Crew<Job, &'static str>>) -> Self {
        let ((begins, begun), (answer, answers)) = (channel(), channel());
        Self { crew, begins, begun, answer, answers }
    }

    fn ask(&self, name: &'static str, what: Do) -> Ticket<Job, &'static str> {
        let answer = self.answer.clone();
        let job = Job(self.begins.clone(), name, what);
        self.crew
            .ask(job, move |done| {
                answer.send((name, done)).ok();
            })
            .unwrap()
    }

    fn begins(&self, name: &str) {
        assert_eq!(self.begun.recv_timeout(PATIENCE).expect("somebody is at work"), name);
    }

    fn is_answered(&self, name: &str, as_: Result<&str, Lost>) {
        assert_eq!(self.answers.recv_timeout(PATIENCE).expect("an answer"), (name, as_));
    }
}

#[test]
fn jobs_of_those_who_went_away_are_neither_done_nor_held() {
    let asker = Asker::of(by_hand(1000, tool));
    let (release, released) = channel();
    let blocks = asker.ask("blocks", Do::Block(released));
    asker.begins("blocks");
    let gone: Vec<_> = (0..999).map(|_| asker.ask("gone", Do::Pass)).collect();
    let stays = asker.ask("stays", Do::Pass);
    let full = asker.crew.ask(Job(asker.begins.clone(), "full", Do::Pass), |_| unreachable!());
    assert!(matches!(full, Err(Full)));
    drop(gone);
    assert_eq!(waiting(&asker.crew), 1);
    assert!(!blocks.withdraw(), "it has begun");
    drop(release);
    asker.is_answered("blocks", Ok("blocks"));
    asker.begins("stays");
    asker.is_answered("stays", Ok("stays"));
    assert!(!stays.withdraw());
    drop(asker.begins);
    drop(asker.answer);
    let crew = Arc::downgrade(&asker.crew.shared);
    drop((asker.crew, blocks, stays));
    assert!(asker.begun.recv_timeout(PATIENCE).is_err() && asker.answers.recv_timeout(PATIENCE).is_err());
    let start = std::time::Instant::now();
    while crew.strong_count() > 0 {
        assert!(start.elapsed() < PATIENCE, "its threads end with a crew");
        thread::yield_now();
    }
}

#[test]
fn a_job_that_does_not_return_costs_its_thread_also_if_nobody_waits_for_it() {
    let asker = Asker::of(by_hand(10, tool));
    let (release, released) = channel();
    let blocks = asker.ask("blocks", Do::Block(released));
    asker.begins("blocks");
    drop(blocks);
    let _next = asker.ask("next", Do::Pass);
    (0..LOOKS_MAX).for_each(|_| assert!(asker.crew.shared.look()));
    assert!(asker.answers.try_recv().is_err() && waiting(&asker.crew) == 1, "it may take this long");
    assert!(asker.crew.shared.look());
    asker.is_answered("blocks", Err(Lost::Overdue));
    asker.is_answered("next", Ok("next"));
    // When it comes back after all, that is nobody's answer, and one thread more is none too many.
    drop(release);
    let _last = asker.ask("last", Do::Pass);
    asker.is_answered("last", Ok("last"));
    assert!(asker.answers.try_recv().is_err());
    assert_eq!(asker.crew.shared.lock().threads, 1);
}

#[test]
fn a_job_that_panics_costs_its_thread() {
    let asker = Asker::of(by_hand(10, tool));
    let _tickets = [asker.ask("panics", Do::Panic), asker.ask("next", Do::Pass)];
    asker.is_answered("panics", Err(Lost::Panicked));
    asker.is_answered("next", Ok("next"));
}

#[test]
fn a_thread_that_is_always_at_work_but_comes_back_is_not_lost() {
    let asker = Asker::of(by_hand(10, tool));
    for _ in 0..20 {
        let (release, released) = channel();
        let _ticket = asker.ask("short", Do::Block(released));
        asker.begins("short");
        (0..LOOKS_MAX).for_each(|_| assert!(asker.crew.shared.look()));
        drop(release);
        asker.is_answered("short", Ok("short"));
    }
    assert_eq!(asker.crew.shared.terms.losses.0.load(Ordering::Relaxed), 0);
}

#[test]
fn a_process_that_has_lost_too_many_threads_is_to_end() {
    let asker = Asker::of(by_hand(LOST_MAX + 1, tool));
    let (releases, tickets): (Vec<_>, Vec<_>) = (0..=LOST_MAX)
        .map(|_| {
            let (release, released) = channel();
            (release, asker.ask("blocks", Do::Block(released)))
        })
        .unzip();
    for _ in 0..LOST_MAX {
        asker.begins("blocks");
        assert!(look_until_overdue(&asker.crew));
        asker.is_answered("blocks", Err(Lost::Overdue));
    }
    asker.begins("blocks");
    assert!(!look_until_overdue(&asker.crew));
    drop((releases, tickets));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_watch_comes_with_a_crew_and_needs_no_call() {
    let terms = Terms { looks_max: 0, ..terms(1, 10) };
    let asker = Asker::of(Crew::start(terms, tool).unwrap());
    let (_release, released) = channel();
    let blocks = asker.ask("blocks", Do::Block(released));
    asker.begins("blocks");
    drop(blocks);
    let _next = asker.ask("next", Do::Pass);
    // Not how it ends: a look may find this one at work, too.
    asker.begins("next");
}
