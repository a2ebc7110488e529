//! The bare block reader: what TCP alone can do, the ceiling that benchmarks compare with.
//! A request is 16 bytes (offset, length), the answer that many bytes by plain `send` from memory; no header, no
//! check, no deadline but the socket's own. Not for data.

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

/// Bytes waited for at once, as in the transport.
const PIECE: usize = 256 << 10;

/// Serves `data` to every connection, a thread each, until the process ends. Offsets wrap around.
///
/// # Errors
/// When the address can't be listened on.
pub fn serve(addr: SocketAddr, data: Arc<Vec<u8>>, options: SocketOptions) -> Result<SocketAddr> {
    let listener = TcpListener::bind(addr).map_err(|e| Error::io(format_args!("can't listen on {addr}"), &e))?;
    options.prepare(listener.as_fd()).map_err(|e| Error::io(format_args!("can't set up {addr}"), &e))?;
    let local = listener.local_addr().map_err(|e| Error::io("can't ask the listening address", &e))?;
    let accept = move || {
        for socket in listener.incoming().flatten() {
            let data = Arc::clone(&data);
            let serve = move || {
                // A reader that leaves is the normal end.
                let _ = options.apply(socket.as_fd()).and_then(|()| serve_one(socket, &data));
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
pub struct Reader {
    socket: TcpStream,
}

impl Reader {
    /// Connects.
    ///
    /// # Errors
    /// When the server can't be reached within 5 s.
    pub fn connect(addr: SocketAddr, options: &SocketOptions) -> Result<Self> {
        let socket = bare_connect(addr, options, Instant::now() + Duration::from_secs(5))?;
        let limit = Some(Duration::from_secs(10));
        socket.set_read_timeout(limit).map_err(|e| Error::io("can't set a timeout", &e))?;
        Ok(Reader { socket })
    }

    /// Sends a request; several may be under way, answered in order.
    ///
    /// # Errors
    /// When the connection failed.
    pub fn ask(&mut self, offset: u64, len: u64) -> Result<()> {
        let mut request = [0u8; 16];
        request[..8].copy_from_slice(&offset.to_le_bytes());
        request[8..].copy_from_slice(&len.to_le_bytes());
        self.socket.write_all(&request).map_err(|e| Error::io("bare reader: sending a request", &e))
    }

    /// Receives the oldest answer into `dst`, whose length is what was asked for.
    ///
    /// # Errors
    /// When the connection failed.
    pub fn take(&mut self, dst: &mut [u8]) -> Result<()> {
        let mut filled = 0;
        while filled < dst.len() {
            // Waiting for whole pieces costs a fraction of the wake-ups of plain reads, so the ceiling does that too.
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
