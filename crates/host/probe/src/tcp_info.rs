//! The kernel's statistics of a TCP connection (`TCP_INFO`, tcp(7)). The only unsafe code of this crate: no library
//! in use reads this option.
#![allow(unsafe_code, reason = "getsockopt with a structure rustix does not have")]

use crate::message::TcpView;
use std::net::TcpStream;
use std::os::fd::AsRawFd as _;

/// The connection's statistics; all zero where the kernel has none.
pub fn connection_view(socket: &TcpStream) -> TcpView {
    // SAFETY: `tcp_info` is a structure of integers, for which all zeros is a value.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the pointer is to `info`, which lives through the call and is `len` bytes long; the kernel writes at most `len`
    // bytes, and an older kernel fewer, which leaves zeros.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            std::ptr::from_mut(&mut info).cast(),
            &mut len,
        )
    };
    if result != 0 {
        return TcpView::default();
    }
    let share = |time: u64| if info.tcpi_busy_time == 0 { 0.0 } else { time as f64 / info.tcpi_busy_time as f64 };
    TcpView {
        congestion: rustix::net::sockopt::tcp_congestion(socket).unwrap_or_default(),
        retransmits: info.tcpi_total_retrans.into(),
        segments: info.tcpi_data_segs_out.into(),
        rtt_us: info.tcpi_rtt.into(),
        mss: info.tcpi_snd_mss.into(),
        window_limited: share(info.tcpi_rwnd_limited),
        buffer_limited: share(info.tcpi_sndbuf_limited),
    }
}

/// The combined statistics of an end's connections.
pub fn merge_views(views: &[TcpView]) -> TcpView {
    if views.is_empty() {
        return TcpView::default();
    }
    let count = views.len();
    TcpView {
        congestion: views.first().map(|v| v.congestion.clone()).unwrap_or_default(),
        retransmits: views.iter().map(|v| v.retransmits).sum(),
        segments: views.iter().map(|v| v.segments).sum(),
        rtt_us: views.iter().map(|v| v.rtt_us).sum::<u64>() / count as u64,
        mss: views.iter().map(|v| v.mss).max().unwrap_or(0),
        window_limited: views.iter().map(|v| v.window_limited).sum::<f64>() / count as f64,
        buffer_limited: views.iter().map(|v| v.buffer_limited).sum::<f64>() / count as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;

    #[test]
    fn a_connection_has_figures() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut two = listener.accept().unwrap().0;
        one.write_all(&[1; 1000]).unwrap();
        two.read_exact(&mut [0; 1000]).unwrap();
        let view = connection_view(&one);
        assert!(view.segments >= 1 && view.mss > 0 && !view.congestion.is_empty(), "{view:?}");
        let both = merge_views(&[view.clone(), view.clone()]);
        assert_eq!((both.segments, both.mss), (view.segments * 2, view.mss));
        assert_eq!(merge_views(&[]), TcpView::default());
    }
}
