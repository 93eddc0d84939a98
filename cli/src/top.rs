// SPDX-License-Identifier: Apache-2.0

//! `ballast top`: devices, models and processes of a running fleet, with their rates, on a screen
//! that is drawn again and again.

mod rates;
mod screen;
mod view;

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use service::{Exit, RuntimeDir};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;

use self::rates::WorkerRates;
use self::view::TopView;
use crate::cli_error::{CliError, CliResult, IoContext};
use crate::fleet_choice::find_fleet;
use crate::fleet_snapshot::FleetSnapshot;
use crate::running_fleet::block_on;

/// Every snapshot costs each worker a call.
const INTERVAL_MIN: Duration = Duration::from_millis(200);

#[derive(clap::Args)]
pub(crate) struct TopArguments {
    /// Runtime directory of the fleet [default: that of the only running fleet]
    #[arg(long, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
    /// How often the figures are read, at least 200ms
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = parse_interval)]
    interval: Duration,
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let interval = service::duration::parse(text).map_err(|error| error.to_string())?;
    match interval < INTERVAL_MIN {
        false => Ok(interval),
        true => Err(format!("at least {}", service::duration::format(INTERVAL_MIN))),
    }
}

/// What a key does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyAction {
    Quit,
    Scroll(isize),
}

fn key_action(key: KeyEvent) -> Option<KeyAction> {
    if key.kind == KeyEventKind::Release {
        return None;
    }
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => Some(KeyAction::Quit),
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => Some(KeyAction::Quit),
        KeyCode::Up | KeyCode::Char('k') => Some(KeyAction::Scroll(-1)),
        KeyCode::Down | KeyCode::Char('j') => Some(KeyAction::Scroll(1)),
        KeyCode::PageUp => Some(KeyAction::Scroll(-10)),
        KeyCode::PageDown => Some(KeyAction::Scroll(10)),
        _ => None,
    }
}

pub(crate) fn run(arguments: TopArguments) -> CliResult {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        let text = "top needs a terminal; `ballast ps --json` prints the figures for programs";
        return Err(CliError::new(Exit::Usage, text));
    }
    block_on(async {
        let directory = find_fleet(arguments.runtime_dir.as_deref()).await?;
        // Without a fleet, this ends before the screen is cleared.
        let first = FleetSnapshot::take(&directory, false).await?;
        let mut screen = Screen::open()?;
        let shown = screen.run(&directory, first, arguments.interval).await;
        screen.close()?;
        shown
    })
}

/// The terminal in raw mode. It is restored when the value is dropped.
struct Screen {
    terminal: ratatui::DefaultTerminal,
    is_open: bool,
    rates: WorkerRates,
    view: TopView,
    skipped: usize,
    trouble: Option<String>,
}

impl Screen {
    fn open() -> CliResult<Self> {
        let terminal = ratatui::try_init().with_context(|| "cannot draw on the terminal".to_owned())?;
        let (rates, view) = (WorkerRates::default(), TopView::default());
        Ok(Self { terminal, is_open: true, rates, view, skipped: 0, trouble: None })
    }

    fn close(&mut self) -> CliResult {
        self.is_open = false;
        ratatui::try_restore().with_context(|| "cannot restore the terminal".to_owned())
    }

    async fn run(&mut self, directory: &RuntimeDir, first: FleetSnapshot, interval: Duration) -> CliResult {
        let signals = || "cannot listen to signals".to_owned();
        let mut terminated = signal(SignalKind::terminate()).with_context(signals)?;
        let mut keys = read_keys()?;
        let mut tick = tokio::time::interval(interval);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.show(Ok(first));
        loop {
            self.draw()?;
            tokio::select! {
                _ = tick.tick() => {
                    let taken = tokio::select! {
                        taken = FleetSnapshot::take(directory, false) => taken,
                        // A process that does not answer holds up the figures, not the keys.
                        key = keys.recv() => match self.press(key) {
                            true => return Ok(()),
                            false => continue,
                        },
                    };
                    self.show(taken);
                }
                key = keys.recv() => {
                    if self.press(key) {
                        return Ok(());
                    }
                }
                _ = terminated.recv() => return Ok(()),
            }
        }
    }

    fn show(&mut self, taken: CliResult<FleetSnapshot>) {
        match taken {
            Ok(snapshot) => {
                let rates = self.rates.advance(&snapshot.workers, Instant::now());
                self.view = TopView::new(&snapshot, &rates);
                self.trouble = None;
            }
            // Its successor may come.
            Err(failure) => self.trouble = Some(format!("no answer: {}", failure.message())),
        }
    }

    /// Returns whether to end. The end of the keys is one: the terminal is gone.
    fn press(&mut self, key: Option<KeyEvent>) -> bool {
        let Some(key) = key else { return true };
        match key_action(key) {
            Some(KeyAction::Quit) => return true,
            Some(KeyAction::Scroll(by)) => self.skipped = self.skipped.saturating_add_signed(by),
            None => {}
        }
        false
    }

    fn draw(&mut self) -> CliResult {
        self.skipped = self.skipped.min(screen::skipped_max(&self.view));
        let (view, skipped, trouble) = (&self.view, self.skipped, self.trouble.as_deref());
        let drawn = self.terminal.draw(|frame| screen::draw(frame, view, skipped, trouble));
        drawn.map(drop).with_context(|| "cannot draw on the terminal".to_owned())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if self.is_open {
            // The error that ends the command counts.
            let _: io::Result<()> = ratatui::try_restore();
        }
    }
}

/// Keys, and changes of the window's size as releases of no key. The thread ends with the process.
fn read_keys() -> CliResult<mpsc::Receiver<KeyEvent>> {
    let (sender, keys) = mpsc::channel(16);
    let read = move || {
        while let Ok(event) = event::read() {
            let key = match event {
                Event::Key(key) => key,
                Event::Resize(..) => {
                    KeyEvent::new_with_kind(KeyCode::Null, KeyModifiers::NONE, KeyEventKind::Release)
                }
                _ => continue,
            };
            if sender.blocking_send(key).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new()
        .name("keys".to_owned())
        .spawn(read)
        .with_context(|| "cannot start a thread".to_owned())?;
    Ok(keys)
}

#[cfg(test)]
mod tests;
