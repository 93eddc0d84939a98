//! Every environment variable that a Ballast process reads. Configuration is not among them (DESIGN: environment only for
//! log level and for what a parent hands to one child).

/// Where sd_notify messages go; one socket per child.
pub const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";
/// Number of the descriptor whose end of file says that the supervisor died.
pub const LIVENESS_FD: &str = "BALLAST_LIVENESS_FD";
/// Number of the descriptor from which a worker reads its attach token.
pub const ATTACH_TOKEN_FD: &str = "BALLAST_ATTACH_TOKEN_FD";
/// Process id for which the inherited descriptors are meant.
pub const LISTEN_PID: &str = "LISTEN_PID";
pub const LISTEN_FDS: &str = "LISTEN_FDS";
pub const LISTEN_FDNAMES: &str = "LISTEN_FDNAMES";
/// How often systemd wants to hear WATCHDOG=1.
pub const WATCHDOG_USEC: &str = "WATCHDOG_USEC";
pub const WATCHDOG_PID: &str = "WATCHDOG_PID";
/// Log level, as `tracing` directives.
pub const LOG: &str = "BALLAST_LOG";

/// What is meant for this process alone: a process that starts children of its own removes these from their environment.
pub const PRIVATE: [&str; 8] = [
    NOTIFY_SOCKET,
    LIVENESS_FD,
    ATTACH_TOKEN_FD,
    LISTEN_PID,
    LISTEN_FDS,
    LISTEN_FDNAMES,
    WATCHDOG_USEC,
    WATCHDOG_PID,
];
