//! Connections to an engine that tell whether anything came over them, so that a pooled one that
//! ended while it was idle is told from an engine that broke off.
//!
//! Invariant: [`Heard::is_stale`] is true only where an earlier answer came over this connection,
//! and no byte after the last one that was sent.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use http::Uri;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// What came over a connection. Clones are of the same connection.
#[derive(Clone, Debug, Default)]
pub(super) struct Heard(Arc<Flags>);

#[derive(Debug, Default)]
struct Flags {
    /// A byte came at any time.
    ever: AtomicBool,
    /// A byte came after the last one that was sent.
    since_sent: AtomicBool,
}

impl Heard {
    /// Whether the connection served a request before, and brought nothing for this one.
    pub(super) fn is_stale(&self) -> bool {
        self.0.ever.load(Ordering::Acquire) && !self.0.since_sent.load(Ordering::Acquire)
    }
}

/// Makes connections that tell.
#[derive(Clone, Debug)]
pub(super) struct Connector<C>(pub(super) C);

/// A connection on its way.
type Connecting<T, E> = Pin<Box<dyn Future<Output = Result<TokioIo<Stream<T>>, E>> + Send>>;

impl<C> tower::Service<Uri> for Connector<C>
where
    C: tower::Service<Uri>,
    C::Future: Send + 'static,
{
    type Response = TokioIo<Stream<C::Response>>;
    type Error = C::Error;
    type Future = Connecting<C::Response, C::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), C::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.0.call(uri);
        Box::pin(async move {
            let inner = TokioIo::new(connecting.await?);
            Ok(TokioIo::new(Stream { inner, heard: Heard::default() }))
        })
    }
}

/// A connection that tells.
#[derive(Debug)]
pub(super) struct Stream<T> {
    inner: TokioIo<T>,
    heard: Heard,
}

impl<T: Connection> Connection for Stream<T> {
    fn connected(&self) -> Connected {
        self.inner.inner().connected().extra(self.heard.clone())
    }
}

impl<T: hyper::rt::Read + Unpin> AsyncRead for Stream<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.inner).poll_read(cx, buffer);
        if buffer.filled().len() > before {
            self.heard.0.ever.store(true, Ordering::Release);
            self.heard.0.since_sent.store(true, Ordering::Release);
        }
        read
    }
}

impl<T: hyper::rt::Write + Unpin> AsyncWrite for Stream<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.heard.0.since_sent.store(false, Ordering::Release);
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.heard.0.since_sent.store(false, Ordering::Release);
        Pin::new(&mut self.inner).poll_write_vectored(cx, slices)
    }
}
