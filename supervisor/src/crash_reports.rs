// SPDX-License-Identifier: Apache-2.0

//! Crash reports: a directory for each child that ended unexpectedly, in `[supervision]
//! crash-reports`.
//!
//! ```text
//! event loop --CrashReport--> queue --> thread "crash-reports" --> report_store.rs (disk)
//!      ^                                       |
//!      '-- latest directory, lost reports -----'
//! ```
//!
//! 1. The event loop never waits for the disk. If the queue is full, the report is lost and
//!    counted.
//! 2. A report that the disk does not take is lost and counted. The log says so once, and once more
//!    when reports are written again.
//! 3. Without a directory in the configuration, nothing is kept and no thread runs.

mod crash_report;
mod ledger_watch;
mod report_store;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use service::logging::LogTail;
use tokio::sync::oneshot;

pub(crate) use self::crash_report::CrashReport;
pub(crate) use self::ledger_watch::KnownLedger;
use self::ledger_watch::LedgerWatch;
use self::report_store::{ReportStore, ReportStoreError};
use crate::status::CrashReportStatus;
use crate::weight_server_admin::WeightServerAdmin;

/// Reports that wait for a slow disk. Each holds the memory of its child's last log lines. More
/// children than this crash in the same moments only if all of them crash.
const QUEUE_MAX: usize = 16;
/// How long the end of a fleet waits for the disk. A disk that answers takes milliseconds.
const FLUSH_WAIT: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(crate) struct CrashReports {
    writer: Option<ReportWriter>,
    progress: Arc<ReportProgress>,
}

struct ReportWriter {
    queue: SyncSender<CrashReport>,
    ledger: LedgerWatch,
    /// The log has said that the disk is too slow.
    is_behind: bool,
    /// Closed when the thread has ended.
    ended: oneshot::Receiver<()>,
}

/// What the thread has done.
#[derive(Default)]
struct ReportProgress {
    latest: Mutex<Option<PathBuf>>,
    lost: AtomicU64,
}

impl CrashReports {
    /// Starts the thread, if there is a directory.
    pub(crate) fn start(directory: Option<&Path>, admin: &WeightServerAdmin) -> io::Result<Self> {
        let Some(directory) = directory else { return Ok(Self::default()) };
        // `ballast ps` names directories in it to people with another working directory.
        let directory = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
        let progress = Arc::<ReportProgress>::default();
        let (queue, reports) = sync_channel(QUEUE_MAX);
        let (end, ended) = oneshot::channel();
        let thread = WriterThread {
            store: ReportStore::at(&directory),
            progress: progress.clone(),
            is_failing: false,
            _end: end,
        };
        thread::Builder::new().name("crash-reports".to_owned()).spawn(move || thread.run(&reports))?;
        let ledger = LedgerWatch::start(admin.clone());
        Ok(Self { writer: Some(ReportWriter { queue, ledger, is_behind: false, ended }), progress })
    }

    /// Memory for the last log lines of a new child. The child runs without it, too.
    pub(crate) fn new_log_tail(&self) -> Option<LogTail> {
        self.writer.as_ref()?;
        match LogTail::create() {
            Ok(tail) => Some(tail),
            Err(error) => {
                tracing::warn!(%error, "no memory for the last log lines of a child: its crash report would lack them");
                None
            }
        }
    }

    /// What the weight-server last said about the memory.
    pub(crate) fn ledger(&self, now: Instant) -> Option<KnownLedger> {
        self.writer.as_ref()?.ledger.latest(now)
    }

    /// Gives a report to the thread, or counts it as lost. Never waits.
    pub(crate) fn add(&mut self, report: CrashReport) {
        let Some(writer) = &mut self.writer else { return };
        match writer.queue.try_send(report) {
            Ok(()) => writer.is_behind = false,
            Err(TrySendError::Full(report) | TrySendError::Disconnected(report)) => {
                self.progress.lost.fetch_add(1, Ordering::Relaxed);
                if !std::mem::replace(&mut writer.is_behind, true) {
                    tracing::warn!(
                        child = report.child,
                        "the disk is too slow for crash reports, they are lost"
                    );
                }
            }
        }
    }

    pub(crate) fn status(&self) -> CrashReportStatus {
        CrashReportStatus {
            latest: self.progress.latest.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            lost: self.progress.lost.load(Ordering::Relaxed),
        }
    }

    /// Waits until the last reports are written, but not for long.
    pub(crate) async fn finish(self) {
        let Some(ReportWriter { queue, ended, .. }) = self.writer else { return };
        drop(queue);
        // An error of the channel is the end of the thread. After the timeout, reports are lost.
        let _ = tokio::time::timeout(FLUSH_WAIT, ended).await;
    }
}

struct WriterThread {
    store: ReportStore,
    progress: Arc<ReportProgress>,
    /// The log has said that reports cannot be written.
    is_failing: bool,
    _end: oneshot::Sender<()>,
}

impl WriterThread {
    fn run(mut self, reports: &Receiver<CrashReport>) {
        match self.store.prepare() {
            Ok(latest) => self.set_latest(latest),
            Err(error) => self.fail(&error),
        }
        for report in reports {
            match self.store.write(&report.name(), &report.files()) {
                Ok(directory) => self.written(&report, directory),
                Err(error) => {
                    self.progress.lost.fetch_add(1, Ordering::Relaxed);
                    self.fail(&error);
                }
            }
        }
    }

    fn written(&mut self, report: &CrashReport, directory: PathBuf) {
        let (child, pid) = (&report.child, report.pid);
        if std::mem::take(&mut self.is_failing) {
            let lost = self.progress.lost.load(Ordering::Relaxed);
            tracing::warn!(lost, "crash reports are written again");
        }
        tracing::warn!(child, pid, report = %directory.display(), "crash report written");
        self.set_latest(Some(directory));
    }

    fn set_latest(&self, latest: Option<PathBuf>) {
        *self.progress.latest.lock().unwrap_or_else(PoisonError::into_inner) = latest;
    }

    fn fail(&mut self, error: &ReportStoreError) {
        if !std::mem::replace(&mut self.is_failing, true) {
            tracing::warn!(error = service::exit::one_line(error), "crash reports cannot be written");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_disk_that_does_not_answer_costs_reports_and_no_time() {
        let (queue, never_read) = sync_channel(QUEUE_MAX);
        let (_end, ended) = oneshot::channel();
        let writer = ReportWriter { queue, ledger: LedgerWatch::unknown(), is_behind: false, ended };
        let mut reports = CrashReports { writer: Some(writer), progress: Arc::default() };
        let began = Instant::now();
        for pid in 0..QUEUE_MAX as u32 + 3 {
            reports.add(crash_report::tests::report("worker-0", pid));
        }
        assert!(began.elapsed() < FLUSH_WAIT, "{:?}", began.elapsed());
        assert_eq!(reports.status(), CrashReportStatus { latest: None, lost: 3 });
        reports.finish().await;
        assert!(began.elapsed() < 3 * FLUSH_WAIT, "{:?}", began.elapsed());
        drop(never_read);
    }

    #[tokio::test]
    async fn reports_are_written_before_the_end_and_without_a_directory_nothing_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let channel = service::grpc::connect_lazy(&directory.path().join("no.sock")).unwrap();
        let admin = WeightServerAdmin::new(channel, tokio::sync::watch::Sender::default().subscribe());
        let mut reports = CrashReports::start(Some(directory.path()), &admin).unwrap();
        assert!(reports.new_log_tail().is_some());
        let report = crash_report::tests::report("worker-0", 7);
        let name = report.name();
        reports.add(report);
        let progress = reports.progress.clone();
        reports.finish().await;
        assert_eq!(*progress.latest.lock().unwrap(), Some(directory.path().join(&name)));
        assert!(directory.path().join(name).join("report.json").exists());

        let mut off = CrashReports::start(None, &admin).unwrap();
        off.add(crash_report::tests::report("worker-0", 8));
        assert!(off.new_log_tail().is_none());
        assert_eq!(off.status(), CrashReportStatus::default());
        off.finish().await;
    }
}
