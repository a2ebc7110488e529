//! The bare block reader: the limit of TCP alone, as a reference for benchmarks. A request is 16 bytes (offset,
//! length); the answer is that many bytes by plain `send` from memory. No header, no check, no deadline except the
//! socket's own. Not for data.

use crate::SocketOptions;
use crate::client::bare_connect;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use spurline_types::{Error, ErrorKind, Result};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes per receive call, as in the transport.
const PIECE: usize = 256 << 10;

/// Serves `data` to every connection, one thread each, until the process ends. Offsets wrap around.
///
/// # Errors
/// When the address can't be listened on.
pub fn serve_data(addr: SocketAddr, data: Arc<Vec<u8>>, options: SocketOptions) -> Result<SocketAddr> {
    let listener = TcpListener::bind(addr).map_err(|e| Error::io(format_args!("can't listen on {addr}"), &e))?;
    options.apply_before_connect(listener.as_fd()).map_err(|e| Error::io(format_args!("can't set up {addr}"), &e))?;
    let local = listener.local_addr().map_err(|e| Error::io("can't read the listening address", &e))?;
    let accept = move || {
        for socket in listener.incoming().flatten() {
            let data = Arc::clone(&data);
            let serve = move || {
                // A reader that disconnects is the normal end.
                let _ = options.apply_options(socket.as_fd()).and_then(|()| serve_one(socket, &data));
            };
            if std::thread::Builder::new().name("bare".into()).spawn(serve).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new()
        .name("bare-accept".into())
        .spawn(accept)
        .map_err(|e| Error::io("can't start a thread", &e))?;
    Ok(local)
}

fn serve_one(mut socket: TcpStream, data: &[u8]) -> std::io::Result<()> {
    let mut request = [0u8; 16];
    loop {
        socket.read_exact(&mut request)?;
        let number =
            |at: usize| request[at..at + 8].iter().rev().fold(0u64, |n, byte| n << 8 | u64::from(*byte)) as usize;
        let (offset, len) = (number(0), number(8).min(data.len()));
        let start = offset % (data.len() - len + 1);
        socket.write_all(&data[start..start + len])?;
    }
}

/// One connection of the bare block reader.
pub struct BareReader {
    socket: TcpStream,
}

impl BareReader {
    /// Connects.
    ///
    /// # Errors
    /// When the server can't be reached within 5 s.
    pub fn connect(addr: SocketAddr, options: &SocketOptions) -> Result<Self> {
        let socket = bare_connect(addr, options, Instant::now() + Duration::from_secs(5))?;
        let limit = Some(Duration::from_secs(10));
        socket.set_read_timeout(limit).map_err(|e| Error::io("can't set a timeout", &e))?;
        Ok(BareReader { socket })
    }

    /// Sends a request; several may be in flight, answered in order.
    ///
    /// # Errors
    /// When the connection failed.
    pub fn send_request(&mut self, offset: u64, len: u64) -> Result<()> {
        let mut request = [0u8; 16];
        request[..8].copy_from_slice(&offset.to_le_bytes());
        request[8..].copy_from_slice(&len.to_le_bytes());
        self.socket.write_all(&request).map_err(|e| Error::io("bare reader: sending a request", &e))
    }

    /// Receives the oldest answer into `dst` of the requested length.
    ///
    /// # Errors
    /// When the connection failed.
    pub fn receive_answer(&mut self, dst: &mut [u8]) -> Result<()> {
        let mut filled = 0;
        while filled < dst.len() {
            // Waiting for whole pieces costs a fraction of the wake-ups of plain reads, so the reference does the
            // same.
            let until = dst.len().min(filled + PIECE);
            match rustix::net::recv(&self.socket, &mut dst[filled..until], RecvFlags::WAITALL) {
                Ok((_, 0)) => return Err(Error::new(ErrorKind::Unavailable, "bare reader: the server is gone")),
                Ok((_, n)) => filled += n,
                Err(Errno::INTR) => {}
                Err(e) => return Err(Error::io("bare reader: receiving an answer", &e.into())),
            }
        }
        Ok(())
    }
}
