/* A defect for each sanitizer, on purpose: a write behind an allocation, and two threads that write without a lock. */
#include <pthread.h>
#include <stdlib.h>

static int shared;

static void *count(void *unused)
{
	for (int i = 0; i < 1000; i++)
		shared++;
	return unused;
}

int defect(void)
{
	pthread_t thread;
	volatile char *bytes = malloc(8);
	int sum;

	pthread_create(&thread, NULL, count, NULL);
	count(NULL);
	pthread_join(thread, NULL);
	bytes[8] = (char)shared;
	sum = bytes[8];
	free((void *)bytes);
	return sum;
}
