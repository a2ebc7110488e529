//! The bare block reader and writer: the limit of TCP alone, as a reference for benchmarks. A request is 16 bytes (offset,
//! length). The answer to a reader is that many bytes by plain `send` from memory. A writer's bytes follow its request; they are
//! received and dropped, and the answer is 8 bytes. No header, no check, no deadline except the socket's own. Not for data.

use crate::SocketOptions;
use crate::client::bare_connect;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use spurline_types::{Error, Result};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes per receive call, as in the transport.
const RECEIVE_BYTES: usize = 256 << 10;
const REQUEST_BYTES: usize = 16;
const ANSWER_BYTES: usize = 8;
const LONGEST_BLOCK: usize = 8 << 20;

/// Serves `data` to every connection, a thread each, until the process ends. Offsets wrap around.
///
/// # Errors
/// When the address can't be listened on.
pub fn serve_data(addr: SocketAddr, data: Arc<Vec<u8>>, options: SocketOptions) -> Result<SocketAddr> {
    serve_connections(addr, options, move |socket| serve_one(socket, &data))
}

/// Receives and drops blocks of every connection, a thread each, until the process ends.
///
/// # Errors
/// When the address can't be listened on.
pub fn serve_sink(addr: SocketAddr, options: SocketOptions) -> Result<SocketAddr> {
    serve_connections(addr, options, drop_one)
}

fn serve_connections(
    addr: SocketAddr,
    options: SocketOptions,
    serve_one: impl Fn(TcpStream) -> std::io::Result<()> + Send + Sync + 'static,
) -> Result<SocketAddr> {
    let serve_one = Arc::new(serve_one);
    let listener = TcpListener::bind(addr).map_err(|e| Error::io(format_args!("can't listen on {addr}"), &e))?;
    options.apply_before_connect(listener.as_fd()).map_err(|e| Error::io(format_args!("can't set up {addr}"), &e))?;
    let local = listener.local_addr().map_err(|e| Error::io("can't read the listening address", &e))?;
    std::thread::Builder::new()
        .name("bare-accept".into())
        .spawn(move || {
            for socket in listener.incoming().flatten() {
                let serve_one = Arc::clone(&serve_one);
                if std::thread::Builder::new()
                    .name("bare".into())
                    .spawn(move || {
                        // A client that disconnects is the normal end.
                        let _ = options.apply_options(socket.as_fd()).and_then(|()| serve_one(socket));
                    })
                    .is_err()
                {
                    return;
                }
            }
        })
        .map_err(|e| Error::io("can't start a thread", &e))?;
    Ok(local)
}

/// Reads a request: offset and length.
fn read_request(socket: &mut TcpStream) -> std::io::Result<(usize, usize)> {
    let mut request = [0u8; REQUEST_BYTES];
    socket.read_exact(&mut request)?;
    let number = |at: usize| request[at..at + 8].iter().rev().fold(0u64, |n, byte| n << 8 | u64::from(*byte)) as usize;
    Ok((number(0), number(8)))
}

fn serve_one(mut socket: TcpStream, data: &[u8]) -> std::io::Result<()> {
    loop {
        let (offset, len) = read_request(&mut socket)?;
        let len = len.min(data.len());
        let start = offset % (data.len() - len + 1);
        socket.write_all(&data[start..start + len])?;
    }
}

fn drop_one(mut socket: TcpStream) -> std::io::Result<()> {
    let mut block = vec![0; LONGEST_BLOCK];
    loop {
        let (_, len) = read_request(&mut socket)?;
        let block = block.get_mut(..len).ok_or(std::io::ErrorKind::InvalidInput)?;
        receive(&socket, block)?;
        socket.write_all(&[0; ANSWER_BYTES])?;
    }
}

/// Receives until `dst` is full.
fn receive(socket: &TcpStream, dst: &mut [u8]) -> std::io::Result<()> {
    let mut filled = 0;
    while filled < dst.len() {
        // Waiting for whole pieces costs a fraction of the wake-ups of plain reads, so the reference does the same.
        let until = dst.len().min(filled + RECEIVE_BYTES);
        match rustix::net::recv(socket, &mut dst[filled..until], RecvFlags::WAITALL) {
            Ok((_, 0)) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            Ok((_, n)) => filled += n,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// A connection of the bare block reader.
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
        receive(&self.socket, dst).map_err(|e| Error::io("bare reader: receiving an answer", &e))
    }
}

/// A connection of the bare block writer.
pub struct BareWriter {
    socket: TcpStream,
    /// A request and the bytes behind, sent together.
    message: Vec<u8>,
}

impl BareWriter {
    /// Connects; each block will have these bytes, at most 8 MiB.
    ///
    /// # Errors
    /// When the server can't be reached within 5 s.
    pub fn connect(addr: SocketAddr, options: &SocketOptions, block: &[u8]) -> Result<Self> {
        let BareReader { socket } = BareReader::connect(addr, options)?;
        let mut message = vec![0; REQUEST_BYTES];
        message[8..].copy_from_slice(&(block.len() as u64).to_le_bytes());
        message.extend_from_slice(block);
        Ok(BareWriter { socket, message })
    }

    /// Sends a block and waits for the answer.
    ///
    /// # Errors
    /// When the connection failed.
    pub fn write_block(&mut self, offset: u64) -> Result<()> {
        self.message[..8].copy_from_slice(&offset.to_le_bytes());
        let sent = self.socket.write_all(&self.message);
        sent.and_then(|()| receive(&self.socket, &mut [0; ANSWER_BYTES])).map_err(|e| Error::io("bare writer", &e))
    }
}
