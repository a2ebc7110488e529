//! Errors of this crate, with explanations: the missing part, or the failed call. Makes no call.

use spurline_types::{Error, ErrorKind};
use std::fmt;

/// Why RDMA is unavailable, from the outermost missing part to the innermost.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RdmaUnavailable {
    /// A library is not installed, or lacks a function.
    #[error(
        "{library} can't be opened ({why}): install it (Debian and Ubuntu: libibverbs1 librdmacm1 ibverbs-providers; RHEL: libibverbs librdmacm)"
    )]
    Library {
        /// The file name.
        library: &'static str,
        /// The loader's message.
        why: String,
    },
    /// The libraries are installed, but the kernel modules are not loaded.
    #[error("the kernel has no RDMA support loaded ({why}): modprobe ib_uverbs rdma_ucm, and the driver of the NIC")]
    Kernel {
        /// The missing part.
        why: String,
    },
    /// No device.
    #[error(
        "there is no RDMA device ({why}): see 'rdma link'; it comes from the NIC's driver (mlx5_ib, irdma, bnxt_re, rdma_rxe)"
    )]
    Device {
        /// Where devices were searched.
        why: String,
    },
    /// A device, but no port can carry data.
    #[error("no RDMA port can be used ({why})")]
    Port {
        /// The ports and states.
        why: String,
    },
}

impl From<RdmaUnavailable> for Error {
    fn from(absent: RdmaUnavailable) -> Self {
        Error::new(ErrorKind::Unavailable, absent.to_string())
    }
}

/// The status of a work completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WcStatus(pub u32);

impl WcStatus {
    /// The request succeeded.
    pub const SUCCESS: WcStatus = WcStatus(0);
    /// The queue pair entered the error state before this request was processed.
    pub const FLUSHED: WcStatus = WcStatus(5);
    /// No acknowledgement after all retransmissions.
    pub const RETRY_EXCEEDED: WcStatus = WcStatus(12);

    /// The name in the C headers, and the meaning.
    pub fn name_and_meaning(self) -> (&'static str, &'static str) {
        match self.0 {
            0 => ("SUCCESS", "done"),
            1 => ("LOC_LEN_ERR", "a receive was too short for the message, or a message too long for the device"),
            2 => ("LOC_QP_OP_ERR", "the local queue pair failed: its port went down, or the request was malformed"),
            3 => ("LOC_EEC_OP_ERR", "the local end-to-end context failed"),
            4 => ("LOC_PROT_ERR", "the local memory is not registered for this access"),
            5 => ("WR_FLUSH_ERR", "the queue pair failed before this request was processed"),
            6 => ("MW_BIND_ERR", "a memory window could not be bound"),
            7 => ("BAD_RESP_ERR", "the peer's NIC sent an unexpected response"),
            8 => ("LOC_ACCESS_ERR", "the local memory may not be written"),
            9 => (
                "REM_INV_REQ_ERR",
                "the peer's NIC found the request invalid: too long for its receive, or not allowed",
            ),
            10 => {
                ("REM_ACCESS_ERR", "the peer's memory may not be written: its key is stale or the range is not its own")
            }
            11 => ("REM_OP_ERR", "the peer's NIC could not complete the request"),
            12 => (
                "RETRY_EXC_ERR",
                "no acknowledgement after all retransmissions: link down, packets dropped, or peer gone",
            ),
            13 => ("RNR_RETRY_EXC_ERR", "the peer had no receive posted at any retransmission"),
            14 => ("LOC_RDD_VIOL_ERR", "a reliable datagram domain does not match"),
            15 => ("REM_INV_RD_REQ_ERR", "the peer refused a reliable datagram"),
            16 => ("REM_ABORT_ERR", "the peer's NIC aborted the operation"),
            17 => ("INV_EECN_ERR", "an invalid end-to-end context number"),
            18 => ("INV_EEC_STATE_ERR", "an end-to-end context in the wrong state"),
            19 => ("FATAL_ERR", "the NIC failed"),
            20 => ("RESP_TIMEOUT_ERR", "the peer's answer took too long"),
            21 => ("GENERAL_ERR", "the NIC reports an error without a name"),
            22 => ("TM_ERR", "tag matching failed"),
            23 => ("TM_RNDV_INCOMPLETE", "a tag matching rendezvous is incomplete"),
            _ => ("unknown", "an unknown status"),
        }
    }
}

impl fmt::Display for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, meaning) = self.name_and_meaning();
        write!(f, "{meaning} ({name}, {})", self.0)
    }
}

/// An error of a verbs operation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// A call of the libraries failed.
    #[error("{call} on {subject} failed: {why}")]
    Call {
        /// The C function.
        call: &'static str,
        /// Device and port, or address.
        subject: String,
        /// The errno's text, and the remedy where known.
        why: String,
        /// The error number.
        errno: i32,
    },
    /// A work request failed.
    #[error("{what} failed on queue pair {qpn:#x} of {subject}: {status}, vendor error {vendor_err:#x}")]
    Work {
        /// What was posted.
        what: &'static str,
        /// Device, port, GIDs of both ends.
        subject: String,
        /// Number of the queue pair.
        qpn: u32,
        /// The status.
        status: WcStatus,
        /// The vendor's error code.
        vendor_err: u32,
    },
    /// The connection was refused.
    #[error("{subject} refused the RDMA connection: {why}")]
    Rejected {
        /// The peer.
        subject: String,
        /// The reason in words.
        why: String,
    },
    /// The peer was not reached.
    #[error("{subject} can't be reached over RDMA: {why}")]
    Unreachable {
        /// The peer.
        subject: String,
        /// The event.
        why: String,
    },
    /// The connection is over.
    #[error("the RDMA connection of {subject} is over: {why}")]
    Disconnected {
        /// Device, port, GIDs of both ends.
        subject: String,
        /// The cause.
        why: String,
    },
    /// A deadline passed.
    #[error("{what}: no answer before the deadline")]
    Timeout {
        /// The operation.
        what: String,
    },
    /// A caller's mistake that types cannot prevent.
    #[error("{0}")]
    Misuse(String),
}

impl VerbsError {
    /// The failure of `call`, from `errno`.
    pub(crate) fn last_os(call: &'static str, subject: impl Into<String>) -> Self {
        Self::from_errno(call, subject, std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }

    /// The failure of `call`, which returned an errno, or -1 with `errno` set. Some drivers (siw's) return the errno
    /// negated.
    pub(crate) fn from_return(call: &'static str, subject: impl Into<String>, answer: i32) -> Self {
        match answer {
            0 | -1 => Self::last_os(call, subject),
            number => Self::from_errno(call, subject, number.saturating_abs()),
        }
    }

    fn from_errno(call: &'static str, subject: impl Into<String>, errno: i32) -> Self {
        let os = std::io::Error::from_raw_os_error(errno);
        let hint = match (call, errno) {
            ("ibv_reg_mr", libc::ENOMEM | libc::EAGAIN | libc::EPERM) => {
                "; the limit of locked memory is too low: see 'ulimit -l', LimitMEMLOCK= of systemd"
            }
            ("ibv_create_cq" | "rdma_create_qp", libc::ENOMEM) => {
                "; the device is out of queues, or the limit of locked memory is too low: see 'ulimit -l'"
            }
            ("rdma_bind_addr", libc::ENODEV | libc::EADDRNOTAVAIL) => "; no RDMA device has this address",
            (_, libc::EADDRINUSE) => "; another process listens there",
            _ => "",
        };
        VerbsError::Call { call, subject: subject.into(), why: format!("{os}{hint}"), errno }
    }
}

impl From<VerbsError> for Error {
    fn from(e: VerbsError) -> Self {
        let kind = match &e {
            VerbsError::Timeout { .. } => ErrorKind::Timeout,
            VerbsError::Misuse(_) => ErrorKind::Invalid,
            VerbsError::Call { call: "ibv_reg_mr", .. } => ErrorKind::NoMemory,
            _ => ErrorKind::Unavailable,
        };
        Error::new(kind, e.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_drivers_answer_with_are_said_whatever_their_sign() {
        for answer in [libc::EINVAL, -libc::EINVAL, i32::MIN] {
            let VerbsError::Call { errno, .. } = VerbsError::from_return("ibv_post_send", "siw0", answer) else {
                panic!("another error");
            };
            assert_eq!(errno, answer.saturating_abs());
        }
    }

    #[test]
    fn every_status_has_words_and_unknown_ones_keep_their_number() {
        for status in 0..24 {
            assert_ne!(WcStatus(status).name_and_meaning().0, "unknown");
        }
        assert!(WcStatus(99).to_string().contains("99"));
        assert!(WcStatus::RETRY_EXCEEDED.to_string().contains("RETRY_EXC_ERR"));
    }
}
