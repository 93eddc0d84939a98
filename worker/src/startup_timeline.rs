//! How long each part of coming up has taken, since the process was started: what a restart costs, part by part.

use std::fmt;
use std::time::{Duration, Instant};

/// Clock ticks of /proc a second, the same on every Linux (USER_HZ).
const TICKS_PER_SECOND: f64 = 100.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StartupStage {
    pub(crate) name: &'static str,
    pub(crate) took: Duration,
}

/// What is done when it is first needed, and what that has taken so far. Nothing on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LazyInit {
    /// Loading kernels.
    pub(crate) modules: Duration,
    /// Recording steps that came again.
    pub(crate) graphs: Duration,
}

/// What follows when the worker is ready, as far as it has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PostReadyStages {
    /// Without what is counted in `lazy`. Zero before.
    pub(crate) first_step: Duration,
    pub(crate) lazy: LazyInit,
}

#[derive(Clone, Debug)]
pub(crate) struct StartupTimeline {
    /// When the process was started.
    origin: Instant,
    /// When the last stage ended.
    last: Instant,
    stages: Vec<StartupStage>,
}

impl StartupTimeline {
    /// To be called early: what came before is the stage "exec", known to 10 ms.
    pub(crate) fn start() -> Self {
        let now = Instant::now();
        let age = process_age().unwrap_or_default();
        // A machine that has just booted may have no such instant.
        let origin = now.checked_sub(age).unwrap_or(now);
        Self { origin, last: now, stages: vec![StartupStage { name: "exec", took: now - origin }] }
    }

    /// What has happened since the last mark was this.
    pub(crate) fn mark(&mut self, name: &'static str) {
        let now = Instant::now();
        self.stages.push(StartupStage { name, took: now - self.last });
        self.last = now;
    }

    pub(crate) fn stages(&self) -> &[StartupStage] {
        &self.stages
    }

    /// From the process's start to the last mark: then it is ready.
    pub(crate) fn total(&self) -> Duration {
        self.last - self.origin
    }

    pub(crate) fn since_start(&self) -> Duration {
        self.origin.elapsed()
    }
}

/// "exec 10.0 ms, driver 101.2 ms, ...: ready after 201.3 ms".
impl fmt::Display for StartupTimeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write(f, self.stages.iter().copied())?;
        write!(f, ": ready after {:.1} ms", milliseconds(self.total()))
    }
}

impl LazyInit {
    pub(crate) fn total(self) -> Duration {
        self.modules + self.graphs
    }
}

impl PostReadyStages {
    pub(crate) fn stages(self) -> impl Iterator<Item = StartupStage> {
        let Self { first_step, lazy: LazyInit { modules, graphs } } = self;
        [("modules", modules), ("first_step", first_step), ("graphs", graphs)]
            .into_iter()
            .map(|(name, took)| StartupStage { name, took })
            .filter(|stage| !stage.took.is_zero())
    }
}

impl fmt::Display for PostReadyStages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write(f, self.stages())
    }
}

fn write(f: &mut fmt::Formatter<'_>, stages: impl Iterator<Item = StartupStage>) -> fmt::Result {
    for (at, StartupStage { name, took }) in stages.enumerate() {
        let comma = if at == 0 { "" } else { ", " };
        write!(f, "{comma}{name} {:.1} ms", milliseconds(took))?;
    }
    Ok(())
}

pub(crate) fn milliseconds(took: Duration) -> f64 {
    took.as_secs_f64() * 1e3
}

/// How long this process has existed.
fn process_age() -> Option<Duration> {
    let uptime = std::fs::read_to_string("/proc/uptime").ok()?;
    let uptime: f64 = uptime.split_ascii_whitespace().next()?.parse().ok()?;
    let started = memory::pidfd::start_ticks(i32::try_from(std::process::id()).ok()?)? as f64;
    Duration::try_from_secs_f64(uptime - started / TICKS_PER_SECOND).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_add_up_to_the_total() {
        let mut timeline = StartupTimeline::start();
        std::thread::sleep(Duration::from_millis(2));
        timeline.mark("driver");
        timeline.mark("context");
        let names: Vec<&str> = timeline.stages().iter().map(|stage| stage.name).collect();
        assert_eq!(names, ["exec", "driver", "context"]);
        assert_eq!(timeline.stages().iter().map(|stage| stage.took).sum::<Duration>(), timeline.total());
        assert!(timeline.stages()[1].took >= Duration::from_millis(2));
        let text = timeline.to_string();
        assert!(text.starts_with("exec ") && text.contains(", context "), "{text}");
        assert!(text.ends_with(&format!(": ready after {:.1} ms", milliseconds(timeline.total()))), "{text}");
        assert!(timeline.since_start() >= timeline.total());
    }

    #[test]
    fn what_has_not_been_needed_yet_is_no_stage() {
        let ms = Duration::from_millis;
        let mut later = PostReadyStages { first_step: ms(7), lazy: LazyInit::default() };
        assert_eq!(later.to_string(), "first_step 7.0 ms");
        later.lazy = LazyInit { modules: ms(12), graphs: Duration::from_micros(250) };
        assert_eq!(later.to_string(), "modules 12.0 ms, first_step 7.0 ms, graphs 0.2 ms");
        assert_eq!(later.lazy.total(), Duration::from_micros(12_250));
        assert_eq!(PostReadyStages::default().stages().count(), 0);
    }

    #[test]
    fn a_process_is_as_old_as_the_kernel_says() {
        let before = process_age().unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let after = process_age().unwrap();
        assert!(after >= before + Duration::from_millis(30), "{before:?} to {after:?}");
        assert!(after < Duration::from_secs(3600), "{after:?}");
    }
}
