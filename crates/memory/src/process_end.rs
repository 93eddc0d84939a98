// SPDX-License-Identifier: Apache-2.0

//! Ends the process without its exit handlers.

/// Ends the process as SIGKILL would, but with an exit code: no exit handler runs, and nothing is
/// flushed.
///
/// The handlers of the CUDA driver and of NVML free what they have allocated, also while another
/// thread is inside the driver. In a worker, the engine's thread may be freeing the model or
/// waiting for a step, and both threads may then free the same memory. The operating system gives
/// back all that the handlers would.
pub fn end_process(exit_code: u8) -> ! {
    // SAFETY: takes a number, runs no code of this process and does not return.
    unsafe { libc::_exit(exit_code.into()) }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    const IS_CHILD: &str = "BALLAST_TEST_ENDS_AT_ONCE";

    extern "C" fn fail() {
        // SAFETY: takes a number and does not return.
        unsafe { libc::_exit(99) }
    }

    #[test]
    fn no_exit_handler_runs() {
        if std::env::var_os(IS_CHILD).is_some() {
            // SAFETY: `fail` may run at exit: it uses nothing of the process.
            unsafe { libc::atexit(fail) };
            super::end_process(7);
        }
        let test = std::env::current_exe().unwrap();
        let status = Command::new(test)
            .args(["--exact", "process_end::tests::no_exit_handler_runs"])
            .env(IS_CHILD, "1")
            .status()
            .unwrap();
        assert_eq!(status.code(), Some(7));
    }
}
