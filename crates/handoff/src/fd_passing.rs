// SPDX-License-Identifier: Apache-2.0

//! Sending and receiving one packet with its file descriptors (SCM_RIGHTS).
//!
//! For packet sockets only (datagram and seqpacket), where one send is one receive.
//!
//! # Invariants
//! 1. Every descriptor that the kernel installs in this process has an owner, also when the receive
//!    fails.
//! 2. Every received descriptor is close-on-exec from the start.

use std::io;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixDatagram;

use nix::sys::socket::{MsgFlags, recvmsg};
use sendfd::SendWithFd;

/// SCM_MAX_FD of the kernel: sendmsg refuses a packet with more descriptors.
pub const MAX_FDS_PER_PACKET: usize = 253;

/// Room for the most descriptors that one packet can carry and for one SCM_CREDENTIALS. With this
/// size, a truncated control message can only mean that the descriptor table is full.
const CONTROL_BYTES: usize =
    cmsg_space(MAX_FDS_PER_PACKET * size_of::<RawFd>()) + cmsg_space(size_of::<libc::ucred>());

/// The kernel reads and writes `cmsghdr` structures in here.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

const _: () = assert!(align_of::<Control>() >= align_of::<libc::cmsghdr>());

/// One received packet.
#[derive(Debug)]
pub struct Received {
    /// How many bytes of the buffer it fills; 0 also if a seqpacket peer has closed.
    pub bytes: usize,
    pub fds: Vec<OwnedFd>,
    /// The sending process, if the socket has SO_PASSCRED set.
    pub sender: Option<Sender>,
}

/// Process and user that the kernel names as the sender of one packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sender {
    pub pid: i32,
    pub uid: u32,
    pub gid: u32,
}

#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    #[error("receiving a packet failed")]
    Io(#[from] io::Error),
    #[error("a packet is longer than the {limit} bytes that this socket takes")]
    TooLong { limit: usize },
    #[error(
        "file descriptors of a packet were lost ({kept} arrived): the descriptor table is full, raise RLIMIT_NOFILE"
    )]
    FdsLost { kept: usize },
}

impl From<ReceiveError> for io::Error {
    /// For callers inside `try_io`, which has to see `WouldBlock` unchanged.
    fn from(error: ReceiveError) -> Self {
        match error {
            ReceiveError::Io(source) => source,
            other => io::Error::new(io::ErrorKind::InvalidData, other),
        }
    }
}

/// Sends one packet with its descriptors. The kernel queues all of it or nothing.
///
/// `socket` is any connected packet socket: std has a type for datagram sockets only, and the
/// system calls for seqpacket sockets are the same.
pub fn send_with_fds(socket: &UnixDatagram, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let sent = if fds.is_empty() {
        socket.send(bytes)?
    } else {
        let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        // sendfd sets no MSG_NOSIGNAL: it relies on the runtime of std, which ignores SIGPIPE.
        socket.send_with_fd(bytes, &raw)?
    };
    if sent == bytes.len() {
        Ok(())
    } else {
        Err(io::Error::new(io::ErrorKind::WriteZero, "a packet socket took part of a packet"))
    }
}

/// Receives one packet into `buffer` with all its descriptors and, if the socket asks for it, its
/// sender.
///
/// If the receive fails, the descriptors that did arrive are closed.
pub fn recv_with_fds(socket: impl AsFd, buffer: &mut [u8]) -> Result<Received, ReceiveError> {
    let limit = buffer.len();
    let mut control = Control([0; CONTROL_BYTES]);
    let (bytes, flags) = {
        let mut parts = [IoSliceMut::new(buffer)];
        let message = recvmsg::<()>(
            socket.as_fd().as_raw_fd(),
            &mut parts,
            Some(&mut control.0),
            MsgFlags::MSG_CMSG_CLOEXEC,
        )
        .map_err(io::Error::from)?;
        (message.bytes, message.flags)
    };
    // Without nix's iterator: it refuses a truncated control message and would leak the descriptors
    // that did arrive.
    let (fds, sender) = read_control(&control.0);
    if flags.contains(MsgFlags::MSG_CTRUNC) {
        return Err(ReceiveError::FdsLost { kept: fds.len() });
    }
    if flags.contains(MsgFlags::MSG_TRUNC) {
        return Err(ReceiveError::TooLong { limit });
    }
    Ok(Received { bytes, fds, sender })
}

/// Reads the control messages in a buffer that was zero before the kernel wrote them, and takes
/// their descriptors.
fn read_control(mut control: &[u8]) -> (Vec<OwnedFd>, Option<Sender>) {
    let mut fds = Vec::new();
    let mut sender = None;
    while let Some((level, kind, data, rest)) = next_message(control) {
        match (level, kind) {
            (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                let (numbers, _) = data.as_chunks::<{ size_of::<RawFd>() }>();
                for number in numbers {
                    // SAFETY: the kernel has just installed this descriptor for us and nothing else
                    // knows its number.
                    fds.push(unsafe { OwnedFd::from_raw_fd(RawFd::from_ne_bytes(*number)) });
                }
            }
            (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) => {
                let (fields, _) = data.as_chunks::<4>();
                if let [pid, uid, gid, ..] = fields {
                    sender = Some(Sender {
                        pid: i32::from_ne_bytes(*pid),
                        uid: u32::from_ne_bytes(*uid),
                        gid: u32::from_ne_bytes(*gid),
                    });
                }
            }
            _ => {}
        }
        control = rest;
    }
    (fds, sender)
}

/// Level, type and data of the first control message, and the bytes behind it; `None` behind the
/// last message.
fn next_message(control: &[u8]) -> Option<(i32, i32, &[u8], &[u8])> {
    let header = control.get(..size_of::<libc::cmsghdr>())?;
    let int = |at: usize| header.get(at..at + 4)?.try_into().ok().map(i32::from_ne_bytes);
    let length_at = std::mem::offset_of!(libc::cmsghdr, cmsg_len);
    let length =
        usize::from_ne_bytes(header.get(length_at..length_at + size_of::<usize>())?.try_into().ok()?);
    let level = int(std::mem::offset_of!(libc::cmsghdr, cmsg_level))?;
    let kind = int(std::mem::offset_of!(libc::cmsghdr, cmsg_type))?;
    let data = control.get(cmsg_align(size_of::<libc::cmsghdr>())..length)?;
    let rest = control.get(cmsg_align(length)..).unwrap_or(&[]);
    Some((level, kind, data, rest))
}

/// CMSG_ALIGN of the kernel.
const fn cmsg_align(bytes: usize) -> usize {
    bytes.next_multiple_of(size_of::<usize>())
}

const fn cmsg_space(data_bytes: usize) -> usize {
    cmsg_align(size_of::<libc::cmsghdr>()) + cmsg_align(data_bytes)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, SeekFrom, Write};

    use nix::fcntl::{FcntlArg, FdFlag, fcntl};
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    use nix::sys::socket::{setsockopt, sockopt};

    use super::*;

    fn memfd_with(text: &[u8]) -> File {
        let mut file = File::from(memfd_create("test", MFdFlags::MFD_CLOEXEC).unwrap());
        file.write_all(text).unwrap();
        file
    }

    #[test]
    fn descriptors_arrive_in_order_close_on_exec_and_name_their_sender() {
        let (left, right) = UnixDatagram::pair().unwrap();
        setsockopt(&right, sockopt::PassCred, &true).unwrap();
        let files: Vec<File> =
            (0..MAX_FDS_PER_PACKET).map(|i| memfd_with(format!("{i}").as_bytes())).collect();
        let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        send_with_fds(&left, b"hello", &fds).unwrap();

        let mut buffer = [0; 16];
        let received = recv_with_fds(&right, &mut buffer).unwrap();
        assert_eq!(&buffer[..received.bytes], b"hello");
        assert_eq!(received.sender.unwrap().pid, std::process::id() as i32);
        assert_eq!(received.fds.len(), MAX_FDS_PER_PACKET);
        for (i, fd) in received.fds.into_iter().enumerate() {
            let flags = FdFlag::from_bits_truncate(fcntl(&fd, FcntlArg::F_GETFD).unwrap());
            assert!(flags.contains(FdFlag::FD_CLOEXEC));
            let mut file = File::from(fd);
            file.seek(SeekFrom::Start(0)).unwrap();
            let mut text = String::new();
            file.read_to_string(&mut text).unwrap();
            assert_eq!(text, format!("{i}"));
        }
    }

    #[test]
    fn too_long_packet_is_an_error_and_leaks_nothing() {
        let (left, right) = UnixDatagram::pair().unwrap();
        let (watched, peer) = UnixDatagram::pair().unwrap();
        send_with_fds(&left, &[7; 32], &[peer.as_fd()]).unwrap();
        drop(peer);
        assert!(matches!(recv_with_fds(&right, &mut [0; 16]), Err(ReceiveError::TooLong { limit: 16 })));
        // Sending fails only when the last copy of the peer is gone.
        assert!(watched.send(b"x").is_err());
    }

    /// In a process of its own, since the limit on descriptors holds for the whole process.
    #[test]
    fn full_descriptor_table_is_an_error_and_leaks_nothing() {
        const CHILD: &str = "BALLAST_TEST_FULL_TABLE";
        if std::env::var_os(CHILD).is_none() {
            let status = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "fd_passing::tests::full_descriptor_table_is_an_error_and_leaks_nothing"])
                .env(CHILD, "1")
                .status()
                .unwrap();
            assert!(status.success());
            return;
        }
        let (left, right) = UnixDatagram::pair().unwrap();
        let (watched, peer) = UnixDatagram::pair().unwrap();
        send_with_fds(&left, b"x", &[peer.as_fd(); 8]).unwrap();
        drop(peer);
        let next_free = right.try_clone().unwrap().as_raw_fd() as u64;
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, next_free + 3, hard).unwrap();
        match recv_with_fds(&right, &mut [0; 16]) {
            Err(ReceiveError::FdsLost { kept }) => assert!(kept < 8),
            other => panic!("{other:?}"),
        }
        assert!(watched.send(b"x").is_err());
    }

    #[test]
    fn unread_packet_keeps_would_block() {
        let (_left, right) = UnixDatagram::pair().unwrap();
        right.set_nonblocking(true).unwrap();
        let error = io::Error::from(recv_with_fds(&right, &mut [0; 16]).unwrap_err());
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
}
