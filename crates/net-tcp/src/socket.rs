//! What is set on every socket, the same on both sides and in the bare reader. It knows no frames.

use rustix::net::sockopt;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Options of a data socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketOptions {
    /// Bytes the kernel may hold for sending; `None` leaves it to the kernel, which grows it as needed.
    pub send_buffer: Option<usize>,
    /// The same for receiving.
    pub recv_buffer: Option<usize>,
    /// A connection with nothing to say is asked for a sign of life after this, and dropped after three more.
    pub keepalive: Duration,
    /// Sent bytes that stay without acknowledgement for this long end the connection.
    pub user_timeout: Duration,
}

impl Default for SocketOptions {
    fn default() -> Self {
        SocketOptions {
            send_buffer: None,
            recv_buffer: None,
            keepalive: Duration::from_secs(15),
            user_timeout: Duration::from_secs(30),
        }
    }
}

impl SocketOptions {
    /// Sets them on a socket, before it is connected or after it was accepted.
    ///
    /// # Errors
    /// When the kernel refuses one.
    pub fn apply(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        sockopt::set_tcp_nodelay(fd, true)?;
        sockopt::set_socket_keepalive(fd, true)?;
        let idle = self.keepalive.max(Duration::from_secs(1));
        sockopt::set_tcp_keepidle(fd, idle)?;
        sockopt::set_tcp_keepintvl(fd, Duration::from_secs((idle.as_secs() / 3).max(1)))?;
        sockopt::set_tcp_keepcnt(fd, 3)?;
        sockopt::set_tcp_user_timeout(fd, u32::try_from(self.user_timeout.as_millis()).unwrap_or(u32::MAX))?;
        if let Some(bytes) = self.send_buffer {
            sockopt::set_socket_send_buffer_size(fd, bytes)?;
        }
        if let Some(bytes) = self.recv_buffer {
            sockopt::set_socket_recv_buffer_size(fd, bytes)?;
        }
        Ok(())
    }
}
