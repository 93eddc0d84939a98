// SPDX-License-Identifier: Apache-2.0

//! The startup timeline: how long each stage took from the start of the process until the worker
//! was ready. It shows what a restart costs, stage by stage.

use std::fmt;
use std::time::{Duration, Instant};

/// Clock ticks per second in /proc, the same on every Linux (USER_HZ).
const TICKS_PER_SECOND: f64 = 100.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StartupStage {
    pub(crate) name: &'static str,
    pub(crate) took: Duration,
}

/// Time spent so far on work that is done when it is first needed. Zero on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LazyInit {
    /// Loading CUDA modules.
    pub(crate) modules: Duration,
    /// Recording CUDA graphs of repeated steps.
    pub(crate) graphs: Duration,
}

/// The stages after the worker was ready, as far as they have come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PostReadyStages {
    /// The first step without the time in `lazy_init`. Zero before the first step.
    pub(crate) first_step: Duration,
    pub(crate) lazy_init: LazyInit,
}

#[derive(Clone, Debug)]
pub(crate) struct StartupTimeline {
    /// When the process started.
    origin: Instant,
    /// When the last stage ended.
    last: Instant,
    stages: Vec<StartupStage>,
}

impl StartupTimeline {
    /// Call this early. The time since the start of the process is the stage "exec", known to 10
    /// ms.
    pub(crate) fn start() -> Self {
        let now = Instant::now();
        let age = process_age().unwrap_or_default();
        // Shortly after boot, an instant before the clock's zero does not exist.
        let origin = now.checked_sub(age).unwrap_or(now);
        Self { origin, last: now, stages: vec![StartupStage { name: "exec", took: now - origin }] }
    }

    /// Ends a stage that began at the last mark.
    pub(crate) fn mark(&mut self, name: &'static str) {
        let now = Instant::now();
        self.stages.push(StartupStage { name, took: now - self.last });
        self.last = now;
    }

    pub(crate) fn stages(&self) -> &[StartupStage] {
        &self.stages
    }

    /// From the start of the process to the last mark, when the worker is ready.
    pub(crate) fn total(&self) -> Duration {
        self.last - self.origin
    }

    pub(crate) fn since_start(&self) -> Duration {
        self.origin.elapsed()
    }
}

/// Formats as "exec 10.0 ms, driver 101.2 ms, ...: ready after 201.3 ms".
impl fmt::Display for StartupTimeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_stages(f, self.stages.iter().copied())?;
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
        let Self { first_step, lazy_init: LazyInit { modules, graphs } } = self;
        [("modules", modules), ("first_step", first_step), ("graphs", graphs)]
            .into_iter()
            .map(|(name, took)| StartupStage { name, took })
            .filter(|stage| !stage.took.is_zero())
    }
}

impl fmt::Display for PostReadyStages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_stages(f, self.stages())
    }
}

fn write_stages(f: &mut fmt::Formatter<'_>, stages: impl Iterator<Item = StartupStage>) -> fmt::Result {
    for (at, StartupStage { name, took }) in stages.enumerate() {
        let comma = if at == 0 { "" } else { ", " };
        write!(f, "{comma}{name} {:.1} ms", milliseconds(took))?;
    }
    Ok(())
}

pub(crate) fn milliseconds(took: Duration) -> f64 {
    took.as_secs_f64() * 1e3
}

/// The age of this process.
fn process_age() -> Option<Duration> {
    let uptime = std::fs::read_to_string("/proc/uptime").ok()?;
    let uptime: f64 = uptime.split_ascii_whitespace().next()?.parse().ok()?;
    let started = handoff::pidfd::start_ticks(i32::try_from(std::process::id()).ok()?)? as f64;
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
    fn work_that_was_not_needed_yet_is_no_stage() {
        let ms = Duration::from_millis;
        let mut stages = PostReadyStages { first_step: ms(7), lazy_init: LazyInit::default() };
        assert_eq!(stages.to_string(), "first_step 7.0 ms");
        stages.lazy_init = LazyInit { modules: ms(12), graphs: Duration::from_micros(250) };
        assert_eq!(stages.to_string(), "modules 12.0 ms, first_step 7.0 ms, graphs 0.2 ms");
        assert_eq!(stages.lazy_init.total(), Duration::from_micros(12_250));
        assert_eq!(PostReadyStages::default().stages().count(), 0);
    }

    #[test]
    fn the_process_age_comes_from_the_kernel() {
        let before = process_age().unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let after = process_age().unwrap();
        assert!(after >= before + Duration::from_millis(30), "{before:?} to {after:?}");
        assert!(after < Duration::from_secs(3600), "{after:?}");
    }
}
