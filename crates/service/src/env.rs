// SPDX-License-Identifier: Apache-2.0

//! Every environment variable that a Ballast process reads: level and format of the log, and what a
//! parent passes to one child. Configuration comes from files.

/// The socket for sd_notify messages. Each child has its own.
pub const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";
/// Number of the descriptor that reports end of file when the supervisor dies.
pub const LIVENESS_FD: &str = "BALLAST_LIVENESS_FD";
/// Number of the descriptor from which a worker reads its attach token.
pub const ATTACH_TOKEN_FD: &str = "BALLAST_ATTACH_TOKEN_FD";
/// Number of the descriptor of the memory for the last log lines.
pub const LOG_TAIL_FD: &str = "BALLAST_LOG_TAIL_FD";
/// Id of the process that the inherited descriptors are for.
pub const LISTEN_PID: &str = "LISTEN_PID";
pub const LISTEN_FDS: &str = "LISTEN_FDS";
pub const LISTEN_FDNAMES: &str = "LISTEN_FDNAMES";
/// The interval at which systemd expects WATCHDOG=1.
pub const WATCHDOG_USEC: &str = "WATCHDOG_USEC";
pub const WATCHDOG_PID: &str = "WATCHDOG_PID";
/// Log level, as `tracing` directives.
pub const LOG: &str = "BALLAST_LOG";
/// Format of log lines: `text` (default) or `json`.
pub const LOG_FORMAT: &str = "BALLAST_LOG_FORMAT";

/// Variables for this process alone. A process removes them from the environment of its own
/// children.
pub const PRIVATE: [&str; 9] = [
    NOTIFY_SOCKET,
    LIVENESS_FD,
    ATTACH_TOKEN_FD,
    LOG_TAIL_FD,
    LISTEN_PID,
    LISTEN_FDS,
    LISTEN_FDNAMES,
    WATCHDOG_USEC,
    WATCHDOG_PID,
];
