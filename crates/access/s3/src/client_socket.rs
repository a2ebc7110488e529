//! The socket of a client, which has to take bytes fast enough. Knows no request.

use crate::client_pace::ClientPace;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;

/// A socket whose writes end with an error where the client takes too few bytes.
pub(crate) struct ClientSocket {
    socket: TcpStream,
    pace: ClientPace,
    /// Set while the client takes nothing.
    stalled: Option<StalledWrite>,
}

struct StalledWrite {
    since: Instant,
    end: Pin<Box<Sleep>>,
}

impl ClientSocket {
    pub fn new(socket: TcpStream) -> Self {
        ClientSocket { socket, pace: ClientPace::default(), stalled: None }
    }

    /// Ends a write that waits for too long.
    fn watch(&mut self, written: Poll<io::Result<usize>>, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(result) = &written {
            let waited = self.stalled.take().map_or_else(Default::default, |stalled| stalled.since.elapsed());
            self.pace.note(waited, *result.as_ref().unwrap_or(&0));
            return written;
        }
        let left = self.pace.wait_left();
        let stalled = self
            .stalled
            .get_or_insert_with(|| StalledWrite { since: Instant::now(), end: Box::pin(tokio::time::sleep(left)) });
        match stalled.end.as_mut().poll(context) {
            Poll::Ready(()) => {
                // Else the kernel would keep the connection until the client has taken what was written.
                let _ = self.socket.set_zero_linger();
                Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for ClientSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(context, buffer)
    }
}

impl AsyncWrite for ClientSocket {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write(context, bytes);
        self.watch(written, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write_vectored(context, slices);
        self.watch(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}
