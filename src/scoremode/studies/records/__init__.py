"""Records of comparisons: left by ``compare``, put together by ``report``, whoever measured them."""
